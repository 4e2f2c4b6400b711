"""What can go wrong, each with the guilty, the moment and the next move."""

from dataclasses import dataclass


class LockstepError(Exception):
    """Every error that lockstep raises on purpose."""


class BadArgument(LockstepError, ValueError):  # noqa: N818
    """A value that cannot be used; the sentence lists what is allowed."""


class Misuse(LockstepError, RuntimeError):  # noqa: N818
    """A call at the wrong moment; the sentence says what to write instead."""


class CannotCut(BadArgument):
    """A batch that cannot be cut into lanes along dimension 0."""


class BadCheckpoint(LockstepError):  # noqa: N818
    """A checkpoint that is missing, damaged, or belongs to another model."""


class NotFinite(LockstepError):  # noqa: N818
    """A gradient with NaN or infinity, in a run that was asked to stop there. The step was not applied."""


class BadEnvironment(LockstepError):  # noqa: N818
    """The machine or the launcher does not give what a run needs."""


class LaunchFailed(LockstepError):  # noqa: N818
    """A function that `lockstep.launch` has called on workers has not come to its end on them."""


SILENT = "it has been silent for"
"""How the cause begins where a peer was waited for in vain."""


@dataclass
class WorkerLost(LockstepError):  # noqa: N818
    """A peer stopped answering. Nothing of the step in flight was applied."""

    rank: int
    step: int
    during: str
    cause: str

    @property
    def is_silent(self) -> bool:
        """Whether it was waited for in vain: it may live."""
        return self.cause.startswith(SILENT)

    def __str__(self) -> str:
        return f"worker {self.rank} was lost during {self.during}, step {self.step}: {self.cause}"


GO_THE_SAME_WAY = (
    "A script goes another way on some workers, or leaves a loop there, if it decides by something of a worker's own: "
    "a clock, the loss of a lane, its rank. Decide by run.step, run.loss or run.total, which are the same on every "
    "worker."
)
"""The advice where workers are about to do different things."""


@dataclass
class Disagreement(LockstepError):  # noqa: N818
    """Two workers are about to do different things; nothing was exchanged."""

    what: str
    here: int
    mine: str
    there: int
    theirs: str
    advice: str = "Every worker must run the same script with the same settings."
    sides: tuple[tuple[int, ...], ...] = ()
    """The ranks of all workers, those together that agree; empty where only two were compared."""

    def __str__(self) -> str:
        return (
            f"workers disagree on {self.what}: worker {self.here} has {self.mine}, "
            f"worker {self.there} has {self.theirs}. {self.advice}"
        )


@dataclass
class PeerGone(LockstepError):  # noqa: N818
    """The wire's error for a peer that stopped answering; `naming_lost_worker` makes it a WorkerLost."""

    rank: int
    cause: str

    def __str__(self) -> str:
        return f"worker {self.rank} stopped answering: {self.cause}"


@dataclass
class WireError(LockstepError):
    """An exchange failed although no connection broke: it would fail again, so nobody tries."""

    during: str
    cause: str

    def __str__(self) -> str:
        return (
            f"{self.during} failed: {self.cause}. No worker is gone, and trying again would fail alike: the run ends."
        )


class naming_lost_worker:  # noqa: N801 - used as a function; a generator would cost a step more
    """Inside, PeerGone becomes WorkerLost, with the step and the moment."""

    __slots__ = ("during", "step")

    def __init__(self, step: int, during: str) -> None:
        self.step, self.during = step, during

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PeerGone):
            raise WorkerLost(error.rank, self.step, self.during, error.cause) from error


_OF_GRAPHS = ("has been modified by an inplace operation", "backward through the graph a second time")


def explained(message: str) -> str:
    """What lanes may have to do with an error of torch, by its message; nothing for most."""
    if not any(words in message for words in _OF_GRAPHS):
        return ""
    return (
        "A graph made in one loop over run.lanes, or in one lane, cannot be used in another: if this is such a graph, "
        "compute it again there, or detach it."
    )


def advise(error: BaseException) -> None:
    """The error carries what lanes may have to do with it, if anything, as a note."""
    note = explained(str(error))
    if note and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
