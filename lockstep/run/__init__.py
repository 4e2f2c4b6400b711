"""What the user holds: `start` makes a `Run`, whose `step_loop` hands out lanes and commits steps.

`replication` makes models equal at the start, `totals` adds for evaluation, `autosave` saves and resumes, `capture`
records lanes as CUDA graphs. `signals` and `faults` are what may be asked of a running worker, by a person and by
`lockstep verify`. `status_report` and `wait_watch` read events: for the launcher, and where there is none.
"""
