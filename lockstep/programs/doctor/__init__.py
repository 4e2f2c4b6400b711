"""`lockstep doctor`: what about this machine will get in the way of a run, and what to type against it.

- `facts`      what is known about the machine, as one value; `gathering` fills it in, the only part that looks
- `checks`     pure functions from facts to a `finding` each
- `diagnosis`  all findings together; `screen` shows it

Nothing here imports torch, except in the process in which `gathering` tries to save.
"""
