"""How long a killed worker holds up training: lockstep, and torchrun restarting DDP from a checkpoint, side by side.

`plan` says what is killed and when, `measuring` goes through it, and `trial` is one kill: a run from its start to its
end, started by a `command`, held at a `gate` until all are ready, with one worker killed. `worker` and `baseline` are
what runs in the workers; both train what `training` makes and write to a `commits` log. `recovery` makes the times of
a trial from that log, `rows` the report from the times, `table` shows it.
"""
