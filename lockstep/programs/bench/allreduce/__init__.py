"""The all-reduce of one tensor by lockstep and by Gloo, beside the memory's own speed, on this machine.

`sizes` reads and writes numbers of bytes, `plan` says what to measure and `measuring` launches it. `worker` runs in
every worker and uses `sides` (the ways to add), `agreement` (are the sums right?) and `timing`; `result` carries the
times back. `rows` makes the numbers to report, `table` and `plot` show them.
"""
