"""What this machine does, measured, side by side with others: training steps here, an all-reduce in `allreduce`,
the time from a kill to the next step in `recovery`, training steps on a GPU in `gpu`.

`plan` says what to measure and `step` launches it. `worker` runs in every worker and uses `sides` (the ways
to train), `agreement` (do they compute the same?) and `timing`; `result` carries the times back. `rows` makes
the numbers to report, `table` shows them. All benchmarks use `launching`, `following` (progress), `machine` (where
it was measured), `devices`, `mps` (several processes on one GPU), `spread` and `width` (of tables).
"""
