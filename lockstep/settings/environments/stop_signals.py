"""What a signal asks of a worker, which depends on who sends it: a person, `lockstep run` or an engine.

# Note [Signals of an engine]
# Slurm announces the end of a job's time by the signal that the job named (`--signal=USR1@60`; submitit takes USR2),
# and a preemption by SIGTERM. It sends to every task, to some of them twice, and kills what is left when its own time
# is up. So there a second signal means nothing new, and lockstep sets no limit of its own. Kubernetes does so with
# SIGTERM. A worker with a roster is one of many jobs or pods: the signal says that this one goes, and others may stay.
# It leaves, and the last one saves. It does not end with 0, because an engine would take its part of the run for done.
# Under `lockstep run` inside a Slurm job a worker has each signal from Slurm, and SIGTERM from its launcher as well.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.settings.environments.roster import ROSTER

SLURM_JOB = "SLURM_JOB_ID"
OF_SLURM = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

GRACE_S = 2.0
"""How long a worker has from a person's signal to its end. `lockstep run` ends what is left a little later."""
ENGINE_GRACE_S = 600.0
"""How long the last checkpoint may take where an engine ends what takes too long."""


_ENGINES = {"kubernetes": "Kubernetes", "torchrun": "torchrun", "mpi": "mpirun"}
"""Launchers that end by SIGKILL what SIGTERM has not ended."""


@dataclass(frozen=True)
class StopSignals:
    """The signals by which all save and end, and those by which one worker leaves; SIGINT always ends all.

    `engine` names who ends this process when its time is up. Without one it ends by itself, `grace_s` after the signal.
    With `in_slurm_job` the launcher is Slurm's, and the signals are the launcher's: a second one means nothing new.
    """

    ends: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    leaves: tuple[signal.Signals, ...] = (signal.SIGUSR1,)
    engine: str | None = None
    in_slurm_job: bool = False

    @property
    def has_limit(self) -> bool:
        """Whether this process ends by itself when it takes too long, or at a second signal."""
        return self.engine is None and not self.in_slurm_job

    @property
    def grace_s(self) -> float:
        """How long the last checkpoint may take."""
        return GRACE_S if self.has_limit else ENGINE_GRACE_S


def stop_signals(environ: Mapping[str, str], launcher: str) -> StopSignals:
    """What signals ask of this worker. See Note [Signals of an engine]."""
    if launcher == "lockstep run":
        return StopSignals(in_slurm_job=bool(launcher_ends(environ)))
    sent: tuple[signal.Signals, ...]
    if environ.get(SLURM_JOB):
        sent, engine = OF_SLURM, "Slurm"
    elif launcher in _ENGINES:
        sent, engine = (signal.SIGTERM,), _ENGINES[launcher]
    elif environ.get(ROSTER):
        sent, engine = (signal.SIGTERM,), "its engine"
    else:
        return StopSignals()
    own = () if signal.SIGUSR1 in sent else (signal.SIGUSR1,)
    if environ.get(ROSTER):
        return StopSignals(ends=(), leaves=sent, engine=engine)
    return StopSignals(ends=sent, leaves=own, engine=engine)


def launcher_ends(environ: Mapping[str, str]) -> tuple[signal.Signals, ...]:
    """The signals of an engine by which `lockstep run` has its workers save and end; none outside of a job."""
    return OF_SLURM if environ.get(SLURM_JOB) else ()
