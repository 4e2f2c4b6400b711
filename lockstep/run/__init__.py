"""What the user holds: `start` makes a `run` in a `context`; there is one in a process (`active`).

Before that all workers agree on its `terms`, and afterwards its `readers` are given its events.

Its parts: `lane_loops` begins the loops over lanes that a script writes, and `step_loop` hands out their lanes and
commits steps; `deferral` is `run.steps`, and `body_passes` its bodies with several updates. `loaders` reads the user's
data, `updates` stands around `optimizer.step()`. `replication` brings models to the device and makes them equal,
`totals` adds for evaluation, `autosave` saves and resumes, `timeline` records. `arguments` checks what the user gives.

`signals` and `faults` are what may be asked of a running worker, by a person and by `lockstep verify`. `status_report`
and `wait_watch` read events: for the launcher, and where there is none.
"""
