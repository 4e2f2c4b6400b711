"""What was asked for: the options of `lockstep.start`, the device, the environments of launchers.

The only room that reads the process's variables. `environment` and `environments/` import no torch: the launcher reads
them too.
"""
