"""What happens in a run, as values. Layers emit events; whoever wants to see them subscribes.

An event carries references, not copies: a subscriber that keeps a tensor clones it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Started:
    """The run is set up on this worker."""

    script: str
    num_workers: int
    num_lanes: int
    seed: int
    threads: int
    exact: bool
    device: str = ""
    wire: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Said:
    """Something the user should know once. What holds for one worker only, it says itself, whoever speaks for all."""

    text: str
    of_one: bool = False


@dataclass(frozen=True)
class LaneBegan:
    """A lane was handed to the user's code; its generators are set."""

    step: int
    lane: int
    data: Any


@dataclass(frozen=True)
class LaneEnded:
    """The user's code is through with a training lane; `gradients` are the lane's own, before weighting."""

    step: int
    lane: int
    gradients: Mapping[str, Any]


@dataclass(frozen=True)
class LaneLeft:
    """A lane, of training or evaluation, is over; the generators stand as the user's code left them."""

    step: int
    lane: int


@dataclass(frozen=True)
class StepBegins:
    """A training step is about to start: all updates of earlier steps are applied.

    `batch` is the number of its batch in the loader's pass; None if the batch is the script's own.
    """

    step: int
    batch: int | None = None


@dataclass(frozen=True)
class StepCommitted:
    """The gradient of a step stands in `p.grad`."""

    step: int
    num_samples: int
    loss: float | None


@dataclass(frozen=True)
class NoiseMeasured:
    """The gradient noise scale was measured in a step; `plain` and `preconditioned` are `lockstep.optim.Noise`.

    `optimizer` is "sgd" or "adam", by how it uses gradients, or "" if it is neither. `preconditioned` is the noise as
    Adam sees it, None for other optimizers. Emitted on every worker, with the same numbers.
    """

    step: int
    num_lanes: int
    optimizer: str
    plain: Any
    preconditioned: Any


@dataclass(frozen=True)
class GenerationFormed:
    """Workers were lost, have left or have joined; `slots` are those who go on, by rank.

    The lanes of those who were lost moved to `moved_to`. `committed`: the step under way had its gradient everywhere
    and counts; else it is computed again.
    """

    step: int
    generation: int
    slots: tuple[int, ...]
    lost: tuple[int, ...]
    left: tuple[int, ...]
    joined: tuple[int, ...]
    moved_lanes: tuple[int, ...]
    moved_to: tuple[int, ...]
    committed: bool
    cause: str
    took_s: float


@dataclass(frozen=True)
class Copied:
    """This process is a copy of the worker that it was until now, and takes the place `slot`."""

    slot: int


@dataclass(frozen=True)
class Closed:
    """The run has ended on this worker."""

    step: int


Event = (
    Started
    | Said
    | LaneBegan
    | LaneEnded
    | LaneLeft
    | StepBegins
    | StepCommitted
    | NoiseMeasured
    | GenerationFormed
    | Copied
    | Closed
)
Subscriber = Callable[[Event], None]


class Events:
    """Hands every event to those who want to see its kind, in the order they subscribed."""

    def __init__(self) -> None:
        self._subscribers: list[tuple[Subscriber, tuple[type, ...]]] = []
        self._by_kind: dict[type, tuple[Subscriber, ...]] = {}

    def subscribe(self, subscriber: Subscriber, *kinds: type) -> None:
        """To events of these kinds; to all if none are named."""
        self._subscribers.append((subscriber, kinds))
        self._by_kind.clear()

    def emit(self, event: Event) -> None:
        kind = type(event)
        if kind not in self._by_kind:
            self._by_kind[kind] = tuple(one for one, kinds in self._subscribers if not kinds or kind in kinds)
        for subscriber in self._by_kind[kind]:
            subscriber(event)
