"""`lockstep run`: starts the workers of a job on this host, watches them, and tells one story of how they ended.

`launch` runs a `job` with a `crew` of `process`es; `worker` is what each process runs; `failure`, `frames` and
`telling` make one story of what went wrong; `guard` ends what a killed launcher leaves behind. Nothing here imports
torch.
"""
