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

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any, NoReturn, Protocol

from torch.optim import Optimizer

from lockstep.chance import Generators, fold, set_generators
from lockstep.data import GlobalBatch
from lockstep.data.device import DeviceMover, unchanged
from lockstep.data.structure import copied, versions_of
from lockstep.determinism.onednn import OneDnnSwitch
from lockstep.errors import BadArgument, Disagreement, Misuse, NotFinite, WorkerLost, naming_lost_worker
from lockstep.events import Events, LaneBegan, LaneEnded, StepBegan, StepCommitted, StepWithdrawn, Wait, WaitBegan
from lockstep.gradients.fingerprint import Drift
from lockstep.gradients.marks import KnownLanes
from lockstep.gradients.plan import StepPlan
from lockstep.gradients.record import StepRecord
from lockstep.lanes import share
from lockstep.optim.noise.watch import NoiseWatch
from lockstep.script.call_site import Site
from lockstep.script.lanes import spoilt_by_a_loss
from lockstep.script.place import StepPlace
from lockstep.script.places import Places
from lockstep.script.turns import LaneLoop, SeenBatch
from lockstep.state.carried import Carried
from lockstep.state.run_state import RunState
from lockstep.step.body_passes import BodyPass
from lockstep.step.refusals import COUNT_BY_STEP, begins_anew, how_to_keep, other_lanes, out_of_rhythm
from lockstep.step.totals import Visit
from lockstep.strategies.protocol import StepEngine
from lockstep.wire.generation import Generation

LANES, UPDATE = "run.lanes", "optimizer.step()"


class Stage(Enum):
    """Where this worker is. See Note [Stages]."""

    OUTSIDE = "outside of run.lanes"
    TRAINING = "in the lanes of a training step"
    EVALUATING = "in the lanes of an evaluation"
    LEFT = "after run.lanes was left before its last lane"
    CLOSED = "after run.close()"


class StepGuard(Protocol):
    """What a step needs of the other workers. Called on the thread of the user's script."""

    @property
    def generation(self) -> Generation:
        """The present one. It changes only inside of `begin` and `recover`."""

    @property
    def looks_closely(self) -> bool:
        """Whether batch and state are compared as a whole in this step: somebody is new, or was until now."""

    @property
    def newcomers(self) -> Sequence[int]:
        """The ranks of those who must show in this step that they compute what the others compute."""

    @property
    def requests(self) -> Sequence[bool]:
        """What this worker asks of all in the step under way."""

    def begin(self, batch: GlobalBatch) -> GlobalBatch:
        """Before a step: workers may come and go now. Gives the batch, for the lanes that this worker carries now."""

    def for_own_lanes(self, batch: GlobalBatch) -> GlobalBatch:
        """The batch, for the lanes that this worker carries now: others may have carried them when it was loaded."""

    def prepared(self) -> None:
        """After `reduce`, before the commit: this worker has done its part of the step."""

    def committed(self, record: StepRecord) -> None:
        """All workers have prepared: the step counts."""

    def refuse(self, text: str) -> NoReturn:
        """The script of this worker, which was put in the middle of a run, is not where it should be: raises."""

    def note(self, text: str, *, may_join: bool = True) -> None:
        """The same, where it may be meant so. With `may_join=False`, a worker that joins is refused all the same."""

    def heal(self, drift: Drift) -> None:
        """Collective. After a step was abandoned: all workers have the state of those who agree."""

    def recover(self, failure: WorkerLost | Disagreement) -> bool:
        """Collective. Goes on with those who are left, or raises; whether the step is committed all the same."""


class StepLoop:
    """The steps of one run on one worker: counts them and walks through their lanes."""

    def __init__(
        self,
        state: RunState,
        places: Places,
        carried: Carried,
        noise: NoiseWatch,
        engine: StepEngine,
        guard: StepGuard,
        moving: DeviceMover,
        events: Events,
        show: Callable[[str], None],
        onednn: OneDnnSwitch,
    ) -> None:
        self.state, self.places, self.carried, self.noise = state, places, carried, noise
        self._engine, self._guard, self.moving, self._events = engine, guard, moving, events
        self._show, self._onednn = show, onednn
        """`show` is called with what the lanes of a committed step have printed."""
        self.stage = Stage.OUTSIDE
        self.body_pass = BodyPass()
        self.visits: list[Visit] = []
        self._noted_sums: set[tuple[Site, bool]] = set()
        self._loops_since_step = 0
        self._loop = 0
        self._first_lane = 0
        self._refused: str | None = None
        """Why a loop over lanes or an update was refused first, if the script went on all the same."""
        self._changed: SeenBatch | None = None
        """The batch of the last loop, if that loop has changed its lanes in place."""

    @property
    def step(self) -> int:
        """How many steps are committed: the number of the one under way, or of the next."""
        return self.state.steps.step

    def training(self, batch: GlobalBatch, loop: LaneLoop) -> Iterator[Any]:
        """Yields the data of each lane; when exhausted, the step's gradient stands in `p.grad` on every worker."""
        with self._remembering_refusals():
            self._refuse_changed_data(batch)
            self._enter(Stage.TRAINING)
            self._find_place(batch, loop)
        batch = self._guard.begin(batch)
        self._events.step = self.step
        if loop.is_step:
            self.visits, self._loop = [], 1  # counted from here, also by workers that came later
            self._events.emit(StepBegan, None if batch.position is None else batch.position.step)
        visited = len(self.visits)
        with self._own_generators() as outside:
            while True:
                self._undo_visits(visited)
                generation = self._guard.generation
                place = self._place(batch, outside)
                plan = StepPlan(self.step, batch.num_samples, generation.assignment, place, least=batch.least)
                try:
                    known: KnownLanes | None = None
                    if loop.is_step and self._guard.newcomers:
                        known = yield from self._rehearse(batch, plan, generation)
                        self._note_sums(loop.site, joins=True)
                        batch, plan = batch.reload(generation.lanes), replace(plan, marks_lanes=True)
                    yield from self._attempt(batch, plan, generation, "lane" if loop.is_step else "calibration")
                    if self._agrees(generation, known):
                        break
                except (WorkerLost, Disagreement) as failure:
                    outside.restore()
                    if self._guard.recover(failure):
                        self._note_sums(loop.site, is_committed=True)
                        break
                self._note_sums(loop.site)
                batch = batch.reload(self._guard.generation.lanes)  # See Note [The same step again]
            self.state.steps.loss = self._conclude(generation.slots)
        self.stage = Stage.OUTSIDE
        self._note_owners(place)
        if loop.is_step:
            self._count(batch)

    def _count(self, batch: GlobalBatch) -> None:
        """The step that trained on `batch` is over."""
        self.places.committed(batch)
        self.state.steps.step += 1
        self.state.steps.num_logged = 0
        self._loops_since_step = 0
        self._events.emit(StepCommitted, batch.num_samples, self.state.steps.loss)
        self._events.step = self.step

    def evaluating(self, batch: GlobalBatch) -> Iterator[Any]:
        """Yields the data of each lane. Nothing is exchanged, nothing counted."""
        self._enter(Stage.EVALUATING)
        with self._own_generators():
            yield from self._own_lanes(self._guard.for_own_lanes(batch), "evaluation")
        self.stage = Stage.OUTSIDE

    def begin_pass(self, body_pass: BodyPass) -> None:
        """The next step is this pass over a body of `run.steps`."""
        self.body_pass = body_pass

    def misplaced(self) -> str | None:
        """Where the script is, if not in the lanes of a training step."""
        return None if self.stage is Stage.TRAINING else self.stage.value

    def print(self, text: str) -> bool:
        """Whether a training step is under way. Then every worker shows what its first lane printed, at the commit."""
        if self.stage is Stage.TRAINING and self.visits[-1].lane == self._first_lane and self.body_pass.is_last:
            self.carried.print(text)
        return self.stage is Stage.TRAINING

    def refuse_unless_outside(self, what: str) -> None:
        with self._remembering_refusals(what):
            self._check_outside(what)

    def _check_outside(self, what: str) -> None:
        if self.stage is Stage.CLOSED:
            raise Misuse(f"{what} after run.close(): the run has ended. Close it when all is done.")
        if self.stage in (Stage.TRAINING, Stage.EVALUATING):
            self.refuse_again()
            raise Misuse(
                f"{what} inside of run.lanes (or after leaving it by break): the lanes of a step are one batch. "
                "Write it after the `for ... in run.lanes(batch)` loop has ended by itself."
            )
        if self.stage is Stage.LEFT:
            raise Misuse(
                f"{what} after run.lanes was left by break, return or an exception in step {self.step}: its gradient "
                "is not complete. Let the `for ... in run.lanes(batch)` loop end by itself (`continue` is fine)."
            )

    def refuse_again(self) -> None:
        """An epoch is over. Raises what was refused in it: the script has caught that, and batches are not trained."""
        if self._refused is not None:
            raise Misuse(self._refused)

    @contextmanager
    def _remembering_refusals(self, what: str = LANES) -> Iterator[None]:
        try:
            yield
        except Misuse as refusal:
            self._refused = self._refused or (str(refusal) if what in (LANES, UPDATE) else None)
            raise

    # -- one attempt at a step ------------------------------------------------------------------------------

    def _attempt(self, batch: GlobalBatch, plan: StepPlan, generation: Generation, use: str) -> Iterator[Any]:
        engine = self._engine
        engine.begin(plan, generation)
        self.carried.begin_step()
        self.places.begins(engine.has_kept_gradients)
        for data in self._own_lanes(batch, use):
            engine.begin_lane()
            yield data
            engine.end_lane()

    def _rehearse(self, batch: GlobalBatch, plan: StepPlan, generation: Generation) -> Generator[Any, None, KnownLanes]:
        """Collective. The step without its newcomers, which is undone again; gives what became of each lane.

        See Note [A step computed twice] in gradients/marks.py.
        """
        visited, newcomers = len(self.visits), self._guard.newcomers
        others = generation.assignment.without(newcomers)
        without = replace(generation, assignment=others)
        plan = replace(plan, assignment=others, marks_lanes=True)
        yield from self._attempt(batch.reload(without.lanes), plan, without, "lane")
        record = self._reduce()
        self._engine.withdraw()
        self._events.emit(StepWithdrawn)
        self._undo_visits(visited)
        return KnownLanes(record.marks, others, frozenset(newcomers))

    def _undo_visits(self, since: int) -> None:
        self.visits[since:] = [replace(visit, counts=False) for visit in self.visits[since:]]

    def _reduce(self) -> StepRecord:
        """Collective. The record of all workers; afterwards the step can be committed."""
        self._events.emit(WaitBegan, Wait.STEP)
        return self._engine.reduce(self._guard.requests, self.carried.is_used)

    def _agrees(self, generation: Generation, known: KnownLanes | None) -> bool:
        """Collective. Whether the step is committed; if not, it is undone, and what spoilt it is mended."""
        record = self._reduce()
        if known is not None and (otherwise := known.computed_otherwise(record.marks, generation.assignment)):
            self._engine.withdraw()
            raise other_lanes(generation.world, otherwise, known.marks, record.marks)
        if record.carries:
            with naming_lost_worker(self.step, "exchanging what lanes carry"):
                self.carried.exchange(generation.wire)
        drift = self._engine.drift()
        if drift is not None:
            self._engine.abandon()
            self._guard.heal(drift)
            return False
        self._guard.prepared()
        self._engine.commit()
        self._guard.committed(record)
        return True

    def _conclude(self, slots: Sequence[int]) -> float | None:
        """Hands the gradient over, unless it is not finite and the user wants none then; gives the mean loss.

        `slots` are those of the ranks that computed the step: some may be gone by now.
        """
        engine = self._engine
        verdict = engine.verdict()
        if verdict is None or verdict.action == "keep":
            self._remark(slots)
            loss = engine.hand_over()
            self._show(self.carried.commit())
            self.noise.take(self.step, self.state.steps.num_lanes, engine.measured)
            return loss
        text = verdict.sentence(self.step, slots).removeprefix("! ")
        engine.abandon()
        if verdict.action == "stop":
            raise NotFinite(text)
        self._events.note(text)
        return None

    def _remark(self, slots: Sequence[int]) -> None:
        bad = self._engine.bad_losses()
        if bad is not None:
            self._events.note(bad.sentence(self.step, slots).removeprefix("! "))

    def _place(self, batch: GlobalBatch, outside: Generators) -> StepPlace:
        generation, closely = self._guard.generation, self._guard.looks_closely
        slot = generation.slots[generation.world.rank]
        return self.places.of_step(batch, outside, slot, self.step, closely=closely)

    def _find_place(self, batch: GlobalBatch, loop: LaneLoop) -> None:
        """Notes where the script is. After a resume it must be there in all that the training depends on."""
        for number in self.places.enter(batch, loop, self.step):
            if number.depends is not None:
                self._guard.refuse(f"{number} {COUNT_BY_STEP}")
            self._guard.note(f"{number} The script's source does not show that training depends on it. {COUNT_BY_STEP}")
        for found in self.places.resumption.set_anew(batch, loop):
            if found.is_wrong:
                self._guard.refuse(f"{found}")
            self._guard.note(f"{found}")
        for value in self.places.resumption.restarted_values(batch):
            if value.is_wrong:
                self._guard.refuse(f"{value} {how_to_keep(value)}")
            self._guard.note(f"{value} {how_to_keep(value)}", may_join=value.may_join)
        anew = self.places.resumption.wrapped.around_pass(batch)
        if anew is not None:
            self._guard.refuse(begins_anew(anew, batch, self.step))
        anew = self.places.resumption.wrapped.around_epochs()
        if anew is not None:
            self._guard.refuse(
                f"run.epochs goes on in the middle, at step {self.step}, and {anew}. Take what belongs to an epoch by "
                "its number (`rates[epoch]`)."
            )
        due = self.places.looped(loop)
        if due is not None:
            self._guard.refuse(out_of_rhythm(f"the loop at {loop.site}", due, self.step))

    def _note_sums(self, site: Site, *, is_committed: bool = False, joins: bool = False) -> None:
        """After a loss, or where a newcomer `joins`. See Note [Sums that a loss spoils] in lanes/sums.py."""
        if (site, is_committed) in self._noted_sums:
            return
        self._noted_sums.add((site, is_committed))
        found = spoilt_by_a_loss(site.path, site.line, is_committed)
        if found is None:
            return
        if is_committed:
            advice = (
                f"The lanes of a lost worker had been computed in step {self.step}: what they counted is not in it."
            )
        else:
            spoilt = "may be in it twice, and what a lost worker had counted is not"
            twice = "are in it twice: a worker joins, and the step is computed without it and with it"
            advice = (
                f"Those of step {self.step} {twice if joins else spoilt}. A list with one entry for each lane, given "
                "to run.total after the lanes of each step, counts every lane once."
            )
        self._guard.note(
            f"{found.words} in {site.file} is done once for each lane that a worker computes. {advice} `{found.name}` "
            "is right again when the script begins it anew."
        )

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
        with self._remembering_refusals(UPDATE):
            self._check_outside(UPDATE)
            due = self.places.updated(optimizer)
            if due is not None:
                self._guard.refuse(out_of_rhythm(UPDATE, due, self.step))
            anew = self.places.rate_set_anew(optimizer)
            if anew is not None:
                self._guard.refuse(anew)

    def _note_owners(self, place: StepPlace) -> None:
        """See Note [Chance outside of lanes] in random_streams.py."""
        for kind, slot in place.settled.items():
            self.places.streams.owners[kind] = slot
            self._events.note(
                f"worker {slot} alone has drawn from {kind}'s generator outside of run.lanes, before step {self.step}: "
                "it has that generator to itself from now on, and a draw by any other is refused"
            )

    def _enter(self, stage: Stage) -> None:
        self.refuse_unless_outside(LANES)
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
            self._onednn.reset()

    def _own_lanes(self, batch: GlobalBatch, use: str) -> Iterator[Any]:
        num_lanes = self.state.steps.num_lanes
        self._first_lane = next(n for n in range(num_lanes) if share(batch.num_samples, n, num_lanes, batch.least))
        for lane in sorted(batch.shares):
            # Evaluation loops between two steps are distinguished by their number.
            # All passes over a body draw the same: see Note [Passes over a body] in body_passes.py.
            first_pass = self.step - self.body_pass.number
            numbers = (first_pass, lane) if use == "lane" else (self.step, self._loops_since_step, lane)
            set_generators(fold(self.state.steps.seed, use, *numbers))
            self._onednn.reset()
            self.visits.append(Visit(self._loop, lane))
            self._events.emit(LaneBegan, lane, use != "evaluation", data=batch.shares[lane])
            data = batch.shares[lane]
            data = data if batch.position is not None else self._own(data, trains=use != "evaluation")
            self.carried.begin_lane(lane, trains=use == "lane")
            versions = [] if batch.position is None else versions_of(data)  # a share of the user's own is a copy
            yield data
            if batch.position is not None and versions_of(data) != versions:
                self._changed = SeenBatch.of(batch, 0)
            self.carried.end_lane(lane, trains=use == "lane")
            self._events.emit(LaneEnded, lane)

    def _own(self, data: Any, trains: bool) -> Any:
        """A share of the user's batch as it is handed out. See Note [Shares are copies]."""
        if self.moving.device.type == "cpu":
            return copied(data) if trains else data
        return self.moving(data, copied if trains else unchanged, is_users=True)


def as_global_batch(batch: Any, generation: Generation, least: int) -> GlobalBatch:
    """A batch from a sharded loader as it is; any other is held whole by every worker and cut here."""
    if isinstance(batch, GlobalBatch):
        whole = batch
    elif isinstance(batch, list | tuple) and any(isinstance(part, GlobalBatch) for part in batch):
        raise Misuse(
            "run.lanes takes one global batch of a sharded loader, not several together: each has its own lanes. Write "
            "one loop over run.lanes for each of them, or make one data set of both."
        )
    else:
        whole = GlobalBatch.cut(batch, generation.assignment.num_lanes, generation.lanes, least)
    if whole.num_samples == 0:
        raise BadArgument("the batch holds no samples, so there is nothing to cut into lanes")
    return whole
