"""`lockstep verify`: runs a script on several numbers of workers and compares what each computed.

`verify` starts the runs and asks `lockstep.verify` what their traces say; `report` and `screen` tell it.
"""
