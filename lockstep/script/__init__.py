"""The place of a step: where each worker's script is, so that all are in the same place before a step is committed.

- `place`           the place of a step as one value, and what to write instead where two workers' places differ
- `places`          follows the script, and makes the place of each step
- `turns`           how many loops over run.lanes make one turn of the script, and which one this is
- `call_site`       the line that called into lockstep, and the script's own variables there
- `random_streams`  the states of the generators outside of lanes, and which worker has one to itself

After a resume, or on a newcomer, the script starts from its top. What of it may then be wrong:

- `counters`        whole numbers that count steps, batches or passes
- `values`          other plain values, and untracked tensors
- `iterators`       where iterators of the script stand
- `attributes`      plain values in the attributes of models and optimizers, which are put back
- `modes`           which modules train and which parameters are frozen, which is put back
- `data_sets`       settings of data sets, and what they hold
- `rhythm`          the order of loops and updates
- `restored_state`  what a script does again to models and rates that were restored
- `restored_generators` the generators outside of lanes, which are put back where they stood
- `changes`         what a script has changed that a resumed run would change twice: before `run.save` in the body of a
                    loop, and at the head of an epoch
- `unsaved`         iterators and schedulers that start again

Lanes are computed by any worker. What their code may not do, or is told about:

- `body`            what the body of a loop over `run.steps` may not do
- `lane_sums`       what a loop over `run.lanes` adds up that nobody totals
- `gradient_hooks`  hooks that change the gradient of each lane by more than a factor
- `lane_dependence` whether what lanes train on depends on what an earlier lane has left
- `lane_state`      what the code of a lane keeps for the next lane; `tables`: rows that it writes by an index;
                    `drawn_once`: what it draws where it is not there yet

What both read from the source:

- `dependence`      whether the training depends on a variable; `scopes`: which variable a name stands for
- `first_reads`     what a turn of a loop, or a pass, may read of an earlier one
- `module_hooks`    tables that forward hooks fill
- `goes_on`         statements that go on from what they have left; `detours`: several that do so together
- `stores`          what the methods of a class store, and together with what
- `owners`          whose code an object runs, and what that code does to its attributes
"""
