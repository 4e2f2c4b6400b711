"""What this machine does, measured: training steps here, an all-reduce in `allreduce`, side by side with others.

`plan` says what to measure and `step` launches it. `worker` runs in every worker and uses `sides` (the ways
to train), `agreement` (do they compute the same?) and `timing`; `result` carries the times back. `rows` makes
the numbers to report, `table` shows them. Both benchmarks use `launching`, `following` (progress), `machine` (where
it was measured) and `spread`.
"""
