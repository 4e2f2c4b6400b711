"""What was asked for: the `options` of `lockstep.start`, the `device`, `faults` on purpose, within `limits`, and
`paths`.

The only room that reads the environment of the process. `environment` and `environments/` import no torch: the
launcher reads them too.
"""
