"""What of a script begins anew after a resume, or on a newcomer: the script starts from its top, and steps go on.

- `counters`        whole numbers that count steps, batches or passes
- `values`          other plain values, and untracked tensors; `texts`: values as text, to compare them;
                    `restarted_values`: those that are other ones, and whether that is wrong
- `iterators`       where iterators of the script stand
- `attributes`      plain values in the attributes of models and optimizers, which are put back
- `modes`           which modules train and which parameters are frozen, which is put back
- `data_sets`       settings of data sets, and what they hold
- `rhythm`          the order of loops and updates
- `restored_state`  what a script does again to models and rates that were restored
- `restored_generators` the generators outside of lanes, which are put back where they stood
- `changes`         what a script has changed that a resumed run would change twice: before `run.save` in the body of a
                    loop, and at the head of an epoch
- `wrapped_passes`  iterators around a pass over a loader, or around epochs, that start again

`resumption` is all of it: what a snapshot has of each, and what each finds (`difference`) where training goes on.
"""

from lockstep.script.restart.restarted_values import Changed

__all__ = ["Changed"]
