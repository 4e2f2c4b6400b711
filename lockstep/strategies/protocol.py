"""The seam of a step: what owns it between its lanes and the update. One file per variant; one conformance suite.

A `Strategy` is the small value that `lockstep.start(strategy=...)` takes. It makes a `StepEngine`, which lives as long
as the run.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from lockstep.events import Events
from lockstep.gradients.batchnorm import Statistics
from lockstep.gradients.bucket_set import BucketOptions, NamedParameter
from lockstep.gradients.buffers import LaneBuffers
from lockstep.gradients.fingerprint import Drift
from lockstep.gradients.finite import BadLosses, NotFiniteVerdict
from lockstep.gradients.health import HealthPlan
from lockstep.gradients.plan import StepPlan
from lockstep.gradients.record import StepRecord
from lockstep.gradients.recorder import LaneRecorder
from lockstep.gradients.squares import SquaresPlan
from lockstep.optim.noise import StepSquares
from lockstep.wire import Wire
from lockstep.wire.generation import Generation


@dataclass(frozen=True)
class Replicas:
    """What all workers hold alike: parameters by name, the modules, and what the names of each module begin with."""

    parameters: Sequence[NamedParameter] = ()
    modules: Sequence[torch.nn.Module] = ()
    prefixes: Sequence[str] = ()


@dataclass(frozen=True)
class EngineOptions:
    """What a run asks of its engine, whatever the strategy."""

    buckets: BucketOptions
    health: HealthPlan
    squares: SquaresPlan
    device: torch.device


class StepEngine(Protocol):
    """Owns a step between its lanes and the update.

    The order of calls is: `begin`; for each of this worker's lanes `begin_lane`, `end_lane`; `reduce`; `commit`;
    `hand_over`. At any point after `begin` and before `hand_over`, `abandon` undoes the step. `begin_loop` and
    `end_loop` stand around all attempts at a step, and around evaluations. Between steps `p.grad` is the user's.
    All of it is called on the thread of the user's script.
    """

    replicas: Replicas
    buffers: LaneBuffers
    statistics: Statistics | None
    """The exchange of synchronised batch norm, if a model has such layers: then lanes are computed at the same time."""
    recorder: LaneRecorder
    """How a captured function takes part in a lane."""
    records_lanes: bool
    """Whether the script has a captured function: then a graph may fold all buckets of a lane."""
    measured: tuple[StepSquares | None, ...]
    """The squares of the last step that was handed over, plain and as its optimizer sees them, if taken."""

    @property
    def min_samples(self) -> int:
        """How many samples a lane needs at least, if the batch has as many."""

    @property
    def has_kept_gradients(self) -> bool:
        """Whether something stood in `p.grad` when the step under way began."""

    @property
    def shows_lanes(self) -> bool:
        """Whether somebody looks at the gradients of each lane in the step under way."""

    def addresses(self) -> tuple[int, ...]:
        """Where parameters and buffers stand now; a recorded lane holds for these."""

    def hold(self, replicas: Replicas, generation: Generation) -> None:
        """Between steps: from now on it owns the steps of these replicas."""

    def look_at_buffers(self) -> None:
        """Between steps: modules may have registered buffers since `hold`."""

    def begin_loop(self, is_first_turn: bool) -> None:
        """Before the lanes of a step or an evaluation. In its first turn a loop is looked at more closely."""

    def end_loop(self) -> None:
        """After them, or after what ended them."""

    def begin(self, plan: StepPlan, generation: Generation) -> None:
        """Starts a step, in this generation to its end: `p.grad` is set aside, the plan is sent to all workers."""

    def begin_lane(self) -> None:
        """Before the user's code computes a lane."""

    def record_loss(self, loss: torch.Tensor, weight: float | None) -> None:
        """Inside a lane: its loss and, if given, the weight by which it counts. SUMMED: the loss is a sum."""

    def pausing(self) -> AbstractContextManager[None]:
        """Backward passes inside may stand outside of lanes. A lane's gradients stay in `p.grad` until it ends."""

    def end_lane(self) -> None:
        """After the user's code has computed a lane: takes what it left in `p.grad`."""

    def reduce(self, requests: Sequence[bool], carries: bool) -> StepRecord:
        """Collective. Gives the record of all workers; afterwards only `commit` is missing.

        `requests` are what this worker wants all to do after the step. `carries`: its lanes carry state on.
        """

    def drift(self) -> Drift | None:
        """Between `reduce` and `commit`: who has drifted from the others, if this step compares. Collective if so."""

    def commit(self) -> None:
        """Collective. Returns when every worker has prepared: then every one of them can hand the step over."""

    def verdict(self) -> NotFiniteVerdict | None:
        """After `reduce`: what to do with the step's gradient, if some lane's is not finite and somebody looked."""

    def bad_losses(self) -> BadLosses | None:
        """After `reduce`: losses of this step that are not finite, if nobody looks at gradients; named seldom."""

    def hand_over(self) -> float | None:
        """After `commit`: `p.grad` holds the step's gradient. Gives the step's loss, if it was recorded."""

    def abandon(self) -> None:
        """Undoes the step under way, if any: `p.grad` and buffers are as they were when it began."""

    def withdraw(self) -> None:
        """Collective. After `reduce`, in place of `commit`: all workers have reduced the step, and undo it."""

    def keep_gradients(self) -> None:
        """Between steps: what stands in `p.grad` shares no memory with the wire afterwards."""

    def before_update(self, optimizer: Optimizer, has_closure: bool) -> None:
        """An optimizer of the run is about to make an update, perhaps by a closure. May be collective.

        If a worker is lost in it, it is called again in the next generation.
        """

    def after_update(self, optimizer: Optimizer) -> None:
        """It has made it. May be collective; called again after a loss, as `before_update`."""

    def settle(self, wire: Wire) -> None:
        """A generation is forming, whose wire is open: completes what a lost worker may have left of an update.

        Collective, also on newcomers, before these are given the state. Called again if the generation cannot form.
        """

    def state(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """What it adds to a snapshot, as JSON; its tensors go into `tensors`. Between steps."""

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Goes on from what `state` gave. Between steps; not collective."""

    def close(self) -> None:
        """Removes hooks and frees memory; what stands in `p.grad` stays. May be called twice."""


class Strategy(Protocol):
    """What a step means. A small immutable value; `str()` gives the form that `--strategy` takes."""

    def __str__(self) -> str: ...

    def engine(self, options: EngineOptions, generation: Generation, events: Events) -> StepEngine:
        """The engine of a run under this strategy; it holds nothing until `hold`."""
