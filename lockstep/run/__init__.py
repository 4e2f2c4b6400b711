"""What the user holds: `start` makes a `run` in a `context`; there is one in a process (`active`).

Before that all workers agree on its `terms`, and afterwards its `readers` are given its events. Its loops over lanes
and its updates are the room `step`.

Its parts: `loaders` reads the user's data, `replication` brings models to the device and makes them equal, `autosave`
saves and resumes, by the `circumstances` in which it runs, `timeline` records. `arguments` checks what the user gives.

`signals` and `faults` are what may be asked of a running worker, by a person and by `lockstep verify`. `status_report`
and `wait_watch` read events: for the launcher, and where there is none.
"""
