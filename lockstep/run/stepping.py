"""Hands out this worker's lanes, one after the other, and knows what stage the step is in.

# Note [Stages]
# Between steps the models are the user's. Inside the lanes, gradients and buffers belong to lanes, and generators to
# the lane under way. A loop that is left by `break` has computed part of a step: nothing of it may be applied, so
# the optimizer refuses to step and the next `run.lanes` refuses to start.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from lockstep.chance import Generators, fold, set_generators
from lockstep.data import GlobalBatch
from lockstep.errors import BadArgument, Misuse
from lockstep.events import Events, LaneBegan, LaneLeft, StepBegins, StepCommitted
from lockstep.gradients.batchnorm import Statistics
from lockstep.gradients.engine import Engine
from lockstep.gradients.step import StepPlan
from lockstep.lanes import Assignment, share
from lockstep.run.totals import Visit


class Stage(Enum):
    """Where this worker is. See Note [Stages]."""

    OUTSIDE = "outside of run.lanes"
    TRAINING = "in the lanes of a training step"
    EVALUATING = "in the lanes of an evaluation"
    LEFT = "after run.lanes was left before its last lane"


class Stepping:
    """The steps of one run on one worker: counts them and walks through their lanes."""

    def __init__(self, rank: int, seed: int, assignment: Assignment, events: Events) -> None:
        self.rank = rank
        self.seed = seed
        self.assignment = assignment
        self.stage = Stage.OUTSIDE
        self.step = 0
        self.loss: float | None = None
        self.statistics: Statistics | None = None
        self.visits: list[Visit] = []
        self._events = events
        self._loops_since_step = 0
        self._loop = 0

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes that this worker carries now."""
        return self.assignment.lanes_of[self.rank]

    def training(self, batch: GlobalBatch, engine: Engine, counts: bool) -> Iterator[Any]:
        """Yields the data of each lane; when exhausted, the step's gradient stands in `p.grad` on every worker.

        With `counts` it is a step: the counter goes on. Without, gradients are off and only buffers are averaged.
        """
        self._enter(Stage.TRAINING)
        plan = StepPlan(self.step, batch.num_samples, self.assignment)
        if counts:
            self.visits = []
            self._events.emit(StepBegins(self.step))
        with self._own_generators():
            if self.statistics is not None:
                self.statistics.begin(plan.step, plan.assignment, plan.present)
            engine.begin(plan)
            for lane, data in self._own_lanes(batch, "lane" if counts else "calibration"):
                engine.begin_lane()
                self._weigh(len(share(batch.num_samples, lane, self.assignment.num_lanes)))
                yield data
                engine.end_lane()
            self.loss = engine.finish()
        self.stage = Stage.OUTSIDE
        if counts:
            self.step += 1
            self._loops_since_step = 0
            self._events.emit(StepCommitted(self.step - 1, batch.num_samples, self.loss))

    def evaluating(self, batch: GlobalBatch) -> Iterator[Any]:
        """Yields the data of each lane. Nothing is exchanged, nothing counted."""
        self._enter(Stage.EVALUATING)
        with self._own_generators():
            yield from (data for _, data in self._own_lanes(batch, "evaluation"))
        self.stage = Stage.OUTSIDE

    def told(self, weight: float) -> None:
        """The lane under way counts by `weight`."""
        self._weigh(weight)

    def refuse_unless_outside(self, what: str) -> None:
        if self.stage in (Stage.TRAINING, Stage.EVALUATING):
            raise Misuse(
                f"{what} inside of run.lanes (or after leaving it by break): the lanes of a step are one batch. "
                "Write it after the `for ... in run.lanes(batch)` loop has ended by itself."
            )
        if self.stage is Stage.LEFT:
            raise Misuse(
                f"{what} after run.lanes was left by break, return or an exception in step {self.step}: its gradient "
                "is not complete. Let the `for ... in run.lanes(batch)` loop end by itself (`continue` is fine)."
            )

    def _enter(self, stage: Stage) -> None:
        self.refuse_unless_outside("run.lanes")
        self.stage = stage
        self._loop += 1
        self._loops_since_step += 1

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Lanes draw from their own keys; the user's streams go on afterwards as if nothing had happened."""
        outside = Generators.now()
        try:
            yield
        except GeneratorExit:
            self.stage = Stage.LEFT
            raise
        finally:
            outside.restore()

    def _own_lanes(self, batch: GlobalBatch, use: str) -> Iterator[tuple[int, Any]]:
        for lane in sorted(batch.shares):
            # Evaluation loops between two steps are told apart by their number.
            numbers = (self.step, lane) if use == "lane" else (self.step, self._loops_since_step, lane)
            set_generators(fold(self.seed, use, *numbers))
            self.visits.append(Visit(self._loop, lane))
            self._events.emit(LaneBegan(self.step, lane, batch.shares[lane]))
            yield lane, batch.shares[lane]
            self._events.emit(LaneLeft(self.step, lane))

    def _weigh(self, weight: float) -> None:
        if self.statistics is not None:
            self.statistics.weight = weight


def as_global_batch(batch: Any, stepping: Stepping) -> GlobalBatch:
    """A batch from a sharded loader as it is; any other is held whole by every worker and cut here."""
    if isinstance(batch, GlobalBatch):
        whole = batch
    else:
        whole = GlobalBatch.cut(batch, stepping.assignment.num_lanes, stepping.lanes)
    if whole.num_samples == 0:
        raise BadArgument("the batch holds no samples, so there is nothing to cut into lanes")
    return whole
