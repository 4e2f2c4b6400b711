"""`lockstep run`: starts the workers of a job on this host, looks after them, and tells one story of how they ended.

Decided without a process: `supervision` (who is replaced, when everything starts again, when it is over), `lateness`
(who is late, hung or stopped), `idleness` (who shows no sign of work), `slowness` and `telling` (how that is said).
Done: `launch` runs a `job` with a `supervisor`, which follows a `crew` of `process`es and `spares`, and a `lookout`
that watches them. `worker` and `spare` are what the processes run; they write the `status` page and reports of
`failure`. `guard` ends what a killed launcher leaves behind, and `scaling` is how somebody else reaches the launcher.
Nothing here imports torch, except a spare.
"""
