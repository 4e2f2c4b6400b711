"""The one active run of this process."""

from typing import Protocol

from lockstep.errors import Misuse


class Run(Protocol):
    """As much of a run as its surroundings need to know."""

    failed: bool
    """Set before the process leaves by an exception: closing then does not wait for the other workers."""

    @property
    def step(self) -> int: ...


_active: Run | None = None


def current() -> Run | None:
    """The run that is active in this process, if there is one."""
    return _active


def refuse_second() -> None:
    """Raises if a run is active."""
    if _active is not None:
        raise Misuse(
            "lockstep.start() was already called in this process; use that run, or close it first (run.close())"
        )


def activate(run: Run) -> None:
    """Makes `run` the active one."""
    global _active
    refuse_second()
    _active = run


def deactivate(run: Run) -> None:
    """No run is active afterwards, if `run` was; another run stays active."""
    global _active
    if _active is run:
        _active = None
