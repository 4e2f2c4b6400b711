"""`lockstep verify`: runs a script on several numbers of workers, and with faults, and compares what each computed.

`verify` starts the `runs`, also with `faults`, and compares their traces by `lockstep.verify`; `report` prints the
result.
"""
