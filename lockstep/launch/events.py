"""What the launcher does and sees, in the vocabulary of lockstep/events.py.

`worker` is the slot that an event is about, LAUNCHER where it is about all of them; `step` is that worker's, or the
number of steps that the run has made. `failure` is a `lockstep.launch.channels.failure.Failure`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.events import Event

LAUNCHER = -1
"""In place of a slot."""


@dataclass
class LaunchBegan(Event):
    """A launch begins, in its run's folder."""

    program: str
    num_workers: int


@dataclass
class WorkerStarted(Event):
    """The launcher has started a worker. `joins`: a run is under way, and its members must admit it.

    `replaces`: the slot had another worker before.
    """

    joins: bool
    replaces: bool


@dataclass
class WorkerNotStarted(Event):
    """A worker that was to join could not be started: the others go on without it."""

    reason: str


@dataclass
class WorkerExited(Event):
    """A worker's process has ended. `status` is its exit code, or the name of the signal that killed it.

    `reason` is why it was killed, where the launcher knows.
    """

    status: str
    is_killed: bool
    reason: str


@dataclass
class MemberLost(Event):
    """A member was lost, and the others go on, or all start again."""

    failure: Any


@dataclass
class JoinerLost(Event):
    """A worker was lost before any member had admitted it."""

    failure: Any
    is_retried: bool


@dataclass
class JoinerMisplaced(Event):
    """A worker that was to join gives up: its script is not where the others' are."""

    failure: Any


@dataclass
class JoinersGivenUp(Event):
    """No more workers are started: so many have not found their place in the script."""

    num_misplaced: int


@dataclass
class RunScaled(Event):
    """`lockstep scale` has set the number of workers."""

    num_before: int
    num_wanted: int


@dataclass
class LeavingAsked(Event):
    """These members were asked to leave after their step."""

    slots: tuple[int, ...]
    num_wanted: int


@dataclass
class StoppedFound(Event):
    """A worker's process is stopped (state T) while others run: the launcher kills it."""

    worker_id: str
    is_member: bool
    seconds: float


@dataclass
class LateFound(Event):
    """A step or a call is late: `finding` is a `Late` of `lockstep.launch.supervision.hangs`.

    `views` are all workers as they are at `time_s`, `places` where in the user's code the suspects are, by slot.
    """

    finding: Any
    views: Mapping[int, Any]
    places: Mapping[int, Any]


@dataclass
class HangFound(Event):
    """These workers, or all there are, show no sign of work for so long: the launcher kills them."""

    slots: tuple[int, ...]
    is_all: bool
    seconds: float


@dataclass
class SlowFound(Event):
    """A worker slows the others down: `finding` is a `Slow` of `lockstep.launch.supervision.stragglers`."""

    finding: Any


@dataclass
class CatchUpFound(Event):
    """A worker that was named as slow is so no longer."""


@dataclass
class WorkersSeen(Event):
    """What the workers do now, about once a second: `rows` are those of the status page, by slot."""

    rows: Mapping[int, Any]


@dataclass
class NobodyStarted(Event):
    """For so long no worker has called `lockstep.start`."""

    num_workers: int
    seconds: float


@dataclass
class RunRestarted(Event):
    """Nobody could go on: all workers start again, from the newest checkpoint if the run `has_trained`."""

    num_workers: int
    has_trained: bool


@dataclass
class RunFailed(Event):
    """The run is over. `failure` is the first one, `why` the reason where it does not give it, `others` came too.

    `num_well` workers were well until then; `log_path` is the log of the one that failed.
    """

    failure: Any
    others: tuple[Any, ...]
    why: str
    num_well: int
    log_path: str


@dataclass
class RunInterrupted(Event):
    """A signal to the launcher has ended the run."""

    signal: str
    num_workers: int
    folder: str


@dataclass
class OutputLost(Event):
    """The workers' output could not be shown any more, which has ended the run."""

    reason: str
    num_workers: int
    folder: str


@dataclass
class RanApart(Event):
    """All workers have finished, and none has called `lockstep.start`: each has run the whole script."""

    num_workers: int


@dataclass
class LaunchEnded(Event):
    """No process of the run is left; the launcher exits with this code."""

    exit_code: int
    took_s: float
