"""The checks, in the order in which they are told. A new one is a function and a row here."""

from collections.abc import Callable

from lockstep.programs.doctor.checks import accelerators, leftovers, network, resources, software
from lockstep.programs.doctor.facts import Facts
from lockstep.programs.doctor.finding import Finding

CHECKS: tuple[Callable[[Facts], Finding], ...] = (
    software.python,
    software.lockstep,
    software.distributions,
    software.llvmlite,
    software.saving,
    resources.cores,
    resources.threads,
    resources.memory,
    resources.shared_memory,
    resources.memfd,
    resources.open_files,
    resources.processes,
    resources.disk,
    accelerators.gpus,
    network.loopback,
    network.host_name,
    network.gloo_interfaces,
    leftovers.orphans,
    leftovers.dead_runs,
    leftovers.partial_checkpoints,
    leftovers.shared_files,
)
