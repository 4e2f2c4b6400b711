"""Reading a script's source: text in, answers out. Nothing here looks at an object of the script.

- `syntax`          the vocabulary: a parsed file, its functions and statements, what these set, read and change
- `scopes`          which variable a name stands for
- `computed`        what is computed from a variable
- `functions`       a function or class with what it inherits from, calls, and does in loops
- `lane_loops`      loops over lanes, and what hands lanes on

Questions that are asked of it:

- `dependence`      whether the training depends on a variable; `effects`: what trains
- `uses`            whether code reads a variable before it sets it
- `first_reads`     whether a turn of a loop, or a pass, reads what an earlier one has left
- `module_hooks`    which tables forward hooks fill
- `goes_on`         which statements go on from what they have left; `statements`: such statements by what they change
- `methods`         what the methods of a class store, and together with what
"""
