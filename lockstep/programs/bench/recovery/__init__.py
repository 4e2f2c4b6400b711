"""How long a killed worker holds up training: lockstep, and torchrun restarting DDP from a checkpoint, side by side.

`plan` defines what is killed and when, and makes the report from the times. `trial` is one kill: a run from its start
to its end, with one worker killed. `worker` is what runs in the workers, and `log` what they write.
"""
