"""Processes, files, failures: how a run starts, steps, saves and ends. The only room that reads the environment.

`start` makes a `Run`, which the user holds. `models` knows what is replicated, `joining` makes it equal at the start,
`stepping` hands out lanes, `progress` knows where in the data it is, `totals` adds for evaluation, `state`,
`checkpoint` and `resuming` save and resume.
`environment` and `rendezvous` find the other workers; `launching` is what `lockstep run` does.
"""
