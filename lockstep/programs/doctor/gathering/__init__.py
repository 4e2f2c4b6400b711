"""Looking at the machine: the only part of the doctor that does. What cannot be looked at becomes None.

`machine` asks the kernel and Python, `control_groups` what a container is limited to, `resolving` who this host is,
`remains` what ended runs left behind, `gpus` the driver; `saving` tries to save and to load.
"""

from collections.abc import Mapping
from pathlib import Path

from lockstep.programs.doctor.facts import Cores, Facts
from lockstep.programs.doctor.gathering import machine, remains
from lockstep.programs.doctor.gathering.control_groups import ControlGroups
from lockstep.programs.doctor.gathering.gpus import gpus
from lockstep.programs.doctor.gathering.resolving import resolve_own_name
from lockstep.programs.doctor.gathering.saving import try_saving

RESOLVING_S = 1.0


def gather(num_workers: int | None, runs: Path, environ: Mapping[str, str]) -> Facts:
    """Everything about this machine that the checks ask for. Without a number, workers are as many as cores."""
    groups = ControlGroups.of_this_process()
    cores = Cores(machine.usable_cores(), groups.cpu_quota())
    return Facts(
        num_workers=num_workers if num_workers is not None else max(int(cores.worth or 1), 1),
        software=machine.software(),
        host_name=resolve_own_name(RESOLVING_S),
        disk=machine.disk(runs),
        cores=cores,
        memory=machine.memory(groups),
        shared_memory=machine.shared_memory(),
        limits=machine.limits(groups),
        network=machine.network(environ),
        threads=environ.get("OMP_NUM_THREADS") or None,
        leftovers=remains.leftovers(runs),
        saving=try_saving(),
        gpus=gpus(),
    )
