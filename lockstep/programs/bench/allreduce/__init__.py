"""The all-reduce of one tensor by lockstep and by Gloo, beside the memory's own speed, on the CPU and on GPUs.

`sizes` reads and writes numbers of bytes, `plan` defines what is measured, `worker` runs in every worker, `plot` draws.
"""
