"""Training steps by lockstep, by DDP and by a plain loop, measured side by side on this machine.

`plan` says what to measure and `step` launches it. `worker` runs in every worker and uses `sides` (the ways
to train), `agreement` (do they compute the same?) and `timing`; `result` carries the times back. `rows` makes
the numbers to report, `table` and `following` show them.
"""
