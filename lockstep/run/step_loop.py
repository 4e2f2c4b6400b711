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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NoReturn, Protocol

from torch.optim import Optimizer

from lockstep.chance import Generators, fold, set_generators
from lockstep.data import GlobalBatch
from lockstep.data.device import DeviceMover, unchanged
from lockstep.data.structure import copied, versions_of
from lockstep.errors import BadArgument, Disagreement, Misuse, NotFinite, WorkerLost
from lockstep.events import Events, LaneBegan, LaneLeft, Said, StepBegins, StepCommitted
from lockstep.gradients.batchnorm import Statistics
from lockstep.gradients.fingerprint import Drift
from lockstep.gradients.plan import StepPlan
from lockstep.gradients.record import StepRecord
from lockstep.lanes import Assignment
from lockstep.optim.noise.watch import NoiseWatch
from lockstep.run.totals import Visit
from lockstep.script.place import Loop, Places, Seen, StepPlace
from lockstep.state.carried import Carried
from lockstep.strategies.replicated import Engine
from lockstep.wire import Wire

KEEP_IN_STATE = "Keep it in an object with a state_dict and give it to run.replicate(..., name=object)."
KEEP_TENSORS = (
    "If they are to go on, keep them in an object with a state_dict and give it to run.replicate(..., name=object)."
)
COUNT_BY_STEP = (
    "Count by run.step and run.epochs, which go on after a resume, or keep the number in an object with a state_dict "
    "and give it to run.replicate(..., name=object)."
)


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
    def looks_closely(self) -> bool:
        """Whether batch and state must be compared as a whole in this step: somebody is new, or was until now."""

    @property
    def slots(self) -> Sequence[int]:
        """The name for people of each rank."""

    def commits(self, record: StepRecord) -> None:
        """All workers hold the step's gradient."""

    def refuses(self, text: str) -> NoReturn:
        """The script of this worker, which was put in the middle of a run, is not where it should be: raises."""

    def notes(self, text: str) -> None:
        """The same is told where it may be meant so."""

    def exchanges(self, exchange: Callable[[Wire], None], during: str) -> None:
        """Collective. Performs an exchange that belongs to the step."""

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
        places: Places,
        moving: DeviceMover | None = None,
    ) -> None:
        self.places = places
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
        self.moving = moving or DeviceMover()
        self.carried = Carried(self.moving.device)
        self._events = events
        self._loops_since_step = 0
        self._loop = 0
        self._changed: Seen | None = None
        """The batch of the last loop, if that loop has changed its lanes in place."""

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes that this worker carries now."""
        return self.assignment.lanes_of[self.rank]

    def training(self, batch: GlobalBatch, engine: Engine, loop: Loop) -> Iterator[Any]:
        """Yields the data of each lane; when exhausted, the step's gradient stands in `p.grad` on every worker."""
        self._refuse_changed_data(batch)
        self._enter(Stage.TRAINING)
        self._find_place(batch, loop)
        batch = self.surroundings.begins(batch)
        if loop.is_step:
            self.visits, self._loop = [], 1  # counted from here, also by workers that came later
            self._events.emit(StepBegins(self.step, None if batch.position is None else batch.position.step))
        visited = len(self.visits)
        with self._own_generators() as outside:
            while True:
                del self.visits[visited:]
                slots = tuple(self.surroundings.slots)
                place = self._place(batch, outside)
                try:
                    yield from self._attempt(batch, engine, place, "lane" if loop.is_step else "calibration")
                    if self._agrees(engine):
                        break
                except (WorkerLost, Disagreement) as failure:
                    outside.restore()
                    if self.surroundings.recovers(failure):
                        break
                batch = batch.reload(self.lanes)  # See Note [The same step again]
            self.loss = self._conclude(engine, slots)
        self.stage = Stage.OUTSIDE
        self._note_owners(place)
        if loop.is_step:
            self.places.committed(batch)
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

    def _attempt(self, batch: GlobalBatch, engine: Engine, place: StepPlace, use: str) -> Iterator[Any]:
        plan = StepPlan(self.step, batch.num_samples, self.assignment, place, least=batch.least)
        if self.statistics is not None:
            self.statistics.begin(plan.step, plan.assignment, plan.present)
        engine.begin(plan)
        self.carried.begin_step()
        self.places.begins(engine.has_kept_gradients)
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
        engine.carries = self.carried.is_used
        record = engine.reduce()
        if record.carries:
            self.surroundings.exchanges(self.carried.exchange, "exchanging what lanes carry")
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
            self.carried.commit()
            self.noise.take(self.step, self.assignment.num_lanes, engine.measured)
            return loss
        told = verdict.sentence(self.step, slots).removeprefix("! ")
        engine.abandon()
        if verdict.action == "stop":
            raise NotFinite(told)
        self._events.emit(Said(told))
        return None

    def _remark(self, engine: Engine, slots: Sequence[int]) -> None:
        bad = engine.remark()
        if bad is not None:
            self._events.emit(Said(bad.sentence(self.step, slots).removeprefix("! ")))

    def _place(self, batch: GlobalBatch, outside: Generators) -> StepPlace:
        closely = self.surroundings.looks_closely
        return self.places.of_step(batch, outside, self.surroundings.slots[self.rank], self.step, closely=closely)

    def _find_place(self, batch: GlobalBatch, loop: Loop) -> None:
        """Notes where the script is. After a resume it must be there in all that the training depends on."""
        for number in self.places.enter(batch, loop, self.step):
            if number.depends is not None:
                self.surroundings.refuses(f"{number} {COUNT_BY_STEP}")
            self.surroundings.notes(f"{number} Nothing that trains seems to depend on it. {COUNT_BY_STEP}")
        for value in self.places.begun_anew():
            if value.depends is not None:
                self.surroundings.refuses(f"{value} {KEEP_IN_STATE}")
            self.surroundings.notes(f"{value} {KEEP_TENSORS}")
        anew = self.places.wrapped(batch)
        if anew is not None:
            self.surroundings.refuses(_begins_anew(anew, batch, self.step))
        due = self.places.looped(loop)
        if due is not None:
            self.surroundings.refuses(_out_of_rhythm(f"the loop at {loop.site}", due, self.step))

    def _refuse_changed_data(self, batch: GlobalBatch) -> None:
        """What a loop wrote to the lanes of a loaded batch stays where they are: another loop cannot rely on it."""
        if self._changed is not None and not self._changed.is_other(batch, 0):
            raise Misuse(
                f"a loop over run.lanes has changed the data of its lanes in place, before step {self.step}, and this "
                "one goes over the same batch: lanes that move to another worker would bring their data unchanged. "
                "Change a copy (`x = x * 2`, not `x.mul_(2)`), in each of the loops."
            )
        self._changed = None

    def updated(self, optimizer: Optimizer) -> None:
        """An optimizer is about to make an update."""
        self.refuse_unless_outside("optimizer.step()")
        due = self.places.updated(optimizer)
        if due is not None:
            self.surroundings.refuses(_out_of_rhythm("optimizer.step()", due, self.step))

    def _note_owners(self, place: StepPlace) -> None:
        """See Note [Chance outside of lanes] in streams.py."""
        for kind, slot in place.settled.items():
            self.places.streams.owners[kind] = slot
            self._events.emit(
                Said(
                    f"worker {slot} alone has drawn from {kind}'s generator outside of run.lanes, before step "
                    f"{self.step}: it has that generator to itself from now on, and a draw by any other is refused"
                )
            )

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
            data = data if batch.position is not None else self._own(data, trains=use != "evaluation")
            self.carried.begin_lane(lane, trains=use == "lane")
            versions = versions_of(data)
            yield lane, data
            if batch.position is not None and versions_of(data) != versions:
                self._changed = Seen.of(batch, 0)
            self.carried.end_lane(lane, trains=use == "lane")
            self._events.emit(LaneLeft(self.step, lane))

    def _own(self, data: Any, trains: bool) -> Any:
        """A share of the user's batch as it is handed out. See Note [Shares are copies]."""
        if self.moving.device.type == "cpu":
            return copied(data) if trains else data
        return self.moving(data, copied if trains else unchanged, is_users=True)

    def _weigh(self, weight: float) -> None:
        if self.statistics is not None:
            self.statistics.weight = weight


def _out_of_rhythm(event: str, due: str, step: int) -> str:
    return (
        f"the script is out of its rhythm at step {step}: {event} came where {due} was due, as it was again and again "
        f"before the snapshot from which this worker goes on. It counts by itself, and has begun anew. {COUNT_BY_STEP}"
    )


def _begins_anew(anew: str, batch: GlobalBatch, step: int) -> str:
    assert batch.position is not None
    return (
        f"the pass over loader {batch.loader} goes on at its batch {batch.position.step}, at step {step}, and {anew}: "
        "other batches would be trained than without the interruption. End the loop by a number that goes on "
        "(`if (run.step + 1) % 4 == 0: break`), and let run.shard load all that belongs to a batch."
    )


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
