"""Hands out this worker's lanes, one after the other, and knows what stage the step is in.

# Note [Stages]
# Between steps the models are the user's. Inside the lanes, gradients and buffers belong to lanes, and generators to
# the lane under way. A loop that is left by `break` has computed part of a step: nothing of it may be applied, so
# the optimizer refuses to step and the next `run.lanes` refuses to start.

# Note [The same step again]
# When a worker is lost, or one has drifted, the step under way is undone, and its lanes are handed out again, under the
# assignment that holds then: the same samples, the same random numbers, the same values in buffers and `p.grad`. The
# loop in the user's code sees a few more rounds and nothing else. It may write to the data of a lane in place: so a
# batch that came from a loader is loaded again, and the shares of one that is the user's own are handed out as copies.

# Note [Shares are copies]
# In training a share of the user's own batch is copied whether or not a step may be redone. A loop that writes to its
# lanes in place, and uses the same batch again, would otherwise compute something else when it is alone. On a GPU a
# share that is there already would be a view into the batch, and how a view is aligned may decide which kernel torch
# takes. One that is not there yet goes there when its turn comes: the whole batch may not fit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

from lockstep.chance import Generators, fold, set_generators
from lockstep.data import GlobalBatch
from lockstep.data.contents import contents
from lockstep.data.copying import copied
from lockstep.data.moving import Moving, unchanged
from lockstep.errors import BadArgument, Disagreement, Misuse, NotFinite, WorkerLost
from lockstep.events import Events, LaneBegan, LaneLeft, Said, StepBegins, StepCommitted
from lockstep.gradients.batchnorm import Statistics
from lockstep.gradients.engine import Engine
from lockstep.gradients.fingerprint import Drift
from lockstep.gradients.plan import StepPlan
from lockstep.gradients.record import StepRecord
from lockstep.lanes import Assignment
from lockstep.run.noise import NoiseWatch
from lockstep.run.totals import Visit


class Stage(Enum):
    """Where this worker is. See Note [Stages]."""

    OUTSIDE = "outside of run.lanes"
    TRAINING = "in the lanes of a training step"
    EVALUATING = "in the lanes of an evaluation"
    LEFT = "after run.lanes was left before its last lane"
    CLOSED = "after run.close()"


class Surroundings(Protocol):
    """What a step needs to know of the other workers, and they of it."""

    def begins(self, batch: GlobalBatch) -> GlobalBatch:
        """A step is about to begin: workers may come and go now. The batch, for the lanes that are carried here now."""

    def computes(self) -> None:
        """A lane is about to be computed."""

    def waits(self) -> None:
        """The lanes are done; the other workers are awaited."""

    def prepares(self) -> None:
        """This worker has done its part of the step, and is about to say so."""

    @property
    def on_probation(self) -> bool:
        """Whether the batch itself must be compared in this step: somebody is new."""

    @property
    def slots(self) -> Sequence[int]:
        """The name for people of each rank."""

    def commits(self, record: StepRecord) -> None:
        """All workers hold the step's gradient."""

    def heals(self, drift: Drift) -> None:
        """Collective. Afterwards all workers have the state of those who agree."""

    def recovers(self, failure: WorkerLost | Disagreement) -> bool:
        """Collective. Goes on with those who are left, or raises; whether the step is committed all the same."""


class Stepping:
    """The steps of one run on one worker: counts them and walks through their lanes."""

    def __init__(
        self,
        rank: int,
        seed: int,
        assignment: Assignment,
        events: Events,
        noise: NoiseWatch,
        moving: Moving | None = None,
    ) -> None:
        self.rank = rank
        self.seed = seed
        self.assignment = assignment
        self.stage = Stage.OUTSIDE
        self.step = 0
        self.loss: float | None = None
        self.least = 1
        """How many samples a lane has at least, if the batch has as many: as the models need it."""
        self.statistics: Statistics | None = None
        self.visits: list[Visit] = []
        self.surroundings: Surroundings
        self.noise = noise
        self.moving = moving or Moving()
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
        batch = self.surroundings.begins(batch)
        if counts:
            self.visits = []
            self._events.emit(StepBegins(self.step))
        visited = len(self.visits)
        with self._own_generators() as outside:
            while True:
                del self.visits[visited:]
                slots = tuple(self.surroundings.slots)
                try:
                    yield from self._attempt(batch, engine, "lane" if counts else "calibration")
                    if self._agrees(engine):
                        break
                except (WorkerLost, Disagreement) as failure:
                    outside.restore()
                    if self.surroundings.recovers(failure):
                        break
                batch = batch.afresh(self.lanes)  # See Note [The same step again]
            self.loss = self._conclude(engine, slots)
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
        if self.stage is Stage.CLOSED:
            raise Misuse(f"{what} after run.close(): the run has ended. Close it when all is done.")
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

    # -- one attempt at a step ------------------------------------------------------------------------------

    def _attempt(self, batch: GlobalBatch, engine: Engine, use: str) -> Iterator[Any]:
        plan = StepPlan(self.step, batch.num_samples, self.assignment, self._described(batch), least=batch.least)
        if self.statistics is not None:
            self.statistics.begin(plan.step, plan.assignment, plan.present)
        engine.begin(plan)
        for lane, data in self._own_lanes(batch, use):
            self.surroundings.computes()
            engine.begin_lane()
            self._weigh(plan.shares[lane])
            yield data
            engine.end_lane()

    def _agrees(self, engine: Engine) -> bool:
        """Collective. Whether the step is committed; if not, it is undone, and what spoilt it is mended."""
        self.surroundings.waits()
        if self.statistics is not None and self.statistics.failure is not None:
            raise self.statistics.failure
        record = engine.reduce()
        drift = engine.drift()
        if drift is not None:
            engine.abandon()
            self.surroundings.heals(drift)
            return False
        self.surroundings.prepares()
        engine.confirm()
        self.surroundings.commits(record)
        return True

    def _conclude(self, engine: Engine, slots: Sequence[int]) -> float | None:
        """Hands the gradient over, unless it is not finite and the user wants none then; gives the mean loss.

        `slots` are those of the ranks that computed the step: some may be gone by now.
        """
        verdict = engine.verdict()
        if verdict is None or verdict.action == "keep":
            self._remark(engine, slots)
            loss = engine.hand_over()
            self.noise.take(self.step, self.assignment.num_lanes, engine.measured)
            return loss
        told = verdict.told(self.step, slots).removeprefix("! ")
        engine.abandon()
        if verdict.action == "stop":
            raise NotFinite(told)
        self._events.emit(Said(told))
        return None

    def _remark(self, engine: Engine, slots: Sequence[int]) -> None:
        bad = engine.remark()
        if bad is not None:
            self._events.emit(Said(bad.told(self.step, slots).removeprefix("! ")))

    def _described(self, batch: GlobalBatch) -> str:
        """A loader's batch by its place; any other by its content, in the first step and where somebody is new."""
        if batch.position is not None:
            return f"batch {batch.position.step} of pass {batch.position.epoch} of loader {batch.loader}"
        is_compared = self.step == 0 or self.surroundings.on_probation
        return contents(batch, self.assignment.num_lanes) if is_compared else ""

    def _enter(self, stage: Stage) -> None:
        self.refuse_unless_outside("run.lanes")
        self.stage = stage
        self._loop += 1
        self._loops_since_step += 1

    @contextmanager
    def _own_generators(self) -> Iterator[Generators]:
        """Lanes draw from their own keys; the user's streams go on afterwards as if nothing had happened."""
        outside = Generators.now()
        try:
            yield outside
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
            data = batch.shares[lane]
            yield lane, data if batch.position is not None else self._own(data, trains=use != "evaluation")
            self._events.emit(LaneLeft(self.step, lane))

    def _own(self, data: Any, trains: bool) -> Any:
        """A share of the user's batch as it is handed out. See Note [Shares are copies]."""
        if self.moving.device.type == "cpu":
            return copied(data) if trains else data
        return self.moving(data, copied if trains else unchanged, is_users=True)

    def _weigh(self, weight: float) -> None:
        if self.statistics is not None:
            self.statistics.weight = weight


def as_global_batch(batch: Any, stepping: Stepping) -> GlobalBatch:
    """A batch from a sharded loader as it is; any other is held whole by every worker and cut here."""
    if isinstance(batch, GlobalBatch):
        whole = batch
    elif isinstance(batch, list | tuple) and any(isinstance(part, GlobalBatch) for part in batch):
        raise Misuse(
            "run.lanes takes one global batch of a sharded loader, not several together: each has its own lanes. Write "
            "one loop over run.lanes for each of them, or make one data set of both."
        )
    else:
        whole = GlobalBatch.cut(batch, stepping.assignment.num_lanes, stepping.lanes, stepping.least)
    if whole.num_samples == 0:
        raise BadArgument("the batch holds no samples, so there is nothing to cut into lanes")
    return whole
