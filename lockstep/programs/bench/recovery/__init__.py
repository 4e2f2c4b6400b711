"""How long a killed worker holds up training: lockstep, and torchrun restarting DDP from a checkpoint, side by side.

`plan` says what is killed and when, and what is made of the times. `trial` is one kill: a run from its start to its
end, with one worker killed; it goes through the plan. `worker` is what runs in the workers, and `log` what they write.
"""
