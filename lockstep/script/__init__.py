"""The place of a step: where each worker's script is, so that all are in the same place before a step is committed.

- `place`           the place of a step as one value, and what to write instead where two workers' places differ
- `places`          follows the script, and makes the place of each step
- `turns`           how many loops over run.lanes make one turn of the script, and which one this is
- `call_site`       the line that called into lockstep, and the script's own variables there
- `schedulers`      schedulers and optimizers that the run was not given
- `random_streams`  the states of the generators outside of lanes, and which worker has one to itself

What users write may be wrong on several workers, or after a stop, without a sign. These find it:

- `lanes/`          what lanes may not do or keep, since any worker computes them
- `restart/`        what begins anew after a resume, or on a newcomer
- `source/`         reads the script's source for both: what it sets, reads and changes, and whether training depends on
                    it
- `owners`          whose code an object runs, and what that code does to its attributes
"""
