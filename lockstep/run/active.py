"""The one active run of this process, and those before it.

# Note [Several runs of one script]
# A script may start one run after another. All workers run the same script, so they count its runs alike. A further run
# needs the workers of the first: it is refused where some have come or gone, and nobody can join it, since a worker
# that comes later runs the script from the top.
"""

from typing import Protocol

from lockstep.errors import Misuse


class ActiveRun(Protocol):
    """As much of a run as its surroundings need to know."""

    failed: bool
    """Set before the process leaves by an exception: closing then does not wait for the other workers."""

    @property
    def step(self) -> int: ...

    @property
    def is_first(self) -> bool: ...

    def close(self) -> None: ...


_active: ActiveRun | None = None
_num_before = 0
_num_meetings = 0
_has_changed = False
_was_first = True


def num_before() -> int:
    """How many runs this process has started before the one that is active, or is about to be."""
    return _num_before


def next_meeting() -> int:
    """How often the workers of this process have met to found a run, this time not counted.

    A start that failed has met too: what it left at the place of the meeting must not be taken for another worker's.
    """
    global _num_meetings
    _num_meetings += 1
    return _num_meetings - 1


def has_changed() -> bool:
    """Whether workers came or went in a run of this process, or it failed on one of several.

    See Note [Several runs of one script].
    """
    return _has_changed


def is_first() -> bool:
    """Whether this worker is the first of the active run, or was when the last one ended; without any it is alone."""
    return _was_first if _active is None else _active.is_first


def current() -> ActiveRun | None:
    """The run that is active in this process, if there is one."""
    return _active


def refuse_second() -> None:
    """Raises if a run is active."""
    if _active is not None:
        raise Misuse(
            "lockstep.start() was already called in this process; use that run, or close it first (run.close())"
        )


def activate(run: ActiveRun) -> None:
    """Makes `run` the active one."""
    global _active
    refuse_second()
    _active = run


def deactivate(run: ActiveRun, has_changed: bool = False) -> None:
    """No run is active afterwards, if `run` was; another run stays active. `has_changed`: its workers have."""
    global _active, _num_before, _has_changed, _was_first
    if _active is run:
        _was_first = run.is_first
        _active = None
        _num_before += 1
        _has_changed = _has_changed or has_changed
