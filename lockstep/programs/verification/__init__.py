"""`lockstep verify`: runs a script on several numbers of workers, and with faults, and compares what each computed.

`verify` starts the runs and asks `lockstep.verify` what their traces show; `report` prints it.
"""
