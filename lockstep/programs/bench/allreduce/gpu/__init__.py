"""The all-reduce of one tensor in the memory of GPUs: lockstep's wire and Gloo, beside the GPU's own speed.

`worker` runs in every worker and uses `sides` (the ways to add) and `timing`. All else is as on the CPU: `plan`,
`agreement` (are the sums right?), `result`, `rows`, `table` and `plot` of the room above.
"""
