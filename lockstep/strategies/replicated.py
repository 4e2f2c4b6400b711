"""Runs the gradient side of a step: folds lanes into buckets and reduces them while the backward pass goes on.

# Note [Launch order]
# Buckets leave in layout order, not in the order they fill: two workers may fill them differently, and a
# collective is matched by position. A bucket that is full while an earlier one is not waits for it, at the latest until
# the end of the lanes, where all that any worker used leaves. A bucket nobody used is not sent.

# Note [Commit]
# A worker that has done its part of the step, and needs nothing more than the others' parts of the sum, says so to all;
# it hands the sum over only when all have said so: no worker can then be left without it. In shared memory the
# closing barrier of the last bucket says it (Note [Closing late] in wire/shared/reducer.py), elsewhere a message. If an
# exchange fails before, nothing of the step is handed over, and `abandon` makes it undone. If it fails after this
# worker spoke, the others may have heard it: those who are left settle it (see lockstep/elastic/membership).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch.autograd.graph import Node

from lockstep.errors import Misuse, told_as_lost
from lockstep.gradients.arrangement import Arrangement, Named, Wanted
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.buffers import Buffers
from lockstep.gradients.fingerprint import Drift
from lockstep.gradients.finite import BadLosses, Verdict
from lockstep.gradients.graphs.recorder import LaneRecorder
from lockstep.gradients.health import Health, HealthPlan, Remarks
from lockstep.gradients.hooks import CheckpointWatch
from lockstep.gradients.losses import told
from lockstep.gradients.plan import StepPlan
from lockstep.gradients.record import SUMMED, StepRecord, Wish
from lockstep.gradients.rules import LaneRules, refuse_outside
from lockstep.gradients.squares import Squares, SquaresPlan, StepSquares, as_means, of_all
from lockstep.gradients.step import StepInFlight
from lockstep.lanes import reduction
from lockstep.wire import Agreement, Proposal, Wire, exchange_with_peers
from lockstep.wire.transport import COMMIT

GradientSight = Callable[[int, dict[str, torch.Tensor]], None]
"""Sees a lane's own gradients, by name, just before they are weighted and folded."""


def _nothing(number: int, total: int) -> None:
    """Nobody wants to know."""


class Engine:
    """The gradients of all replicated models.

    A step is `begin`, then for each of this worker's lanes `begin_lane` and `end_lane`, then `reduce`, `confirm` and
    `hand_over`; at any point before that, `abandon`. Around it, `begin_loop` and `end_loop`. Between steps `p.grad` is
    the user's.
    """

    def __init__(self, wire: Wire, parameters: Sequence[Named], buffers: Buffers, wanted: Wanted | None = None) -> None:
        self._wire = wire
        self.named = list(parameters)
        self._parameters = [named.parameter for named in parameters]
        self.buffers = buffers
        self._paused = False
        self.health = HealthPlan()
        self._remarks = Remarks()
        self.squares = SquaresPlan()
        self.measured: tuple[StepSquares | None, ...] = ()
        """The squares of the last step that was handed over, plain and as its optimizer sees them, if taken."""
        self.wishes = [False] * len(Wish)
        self.carries = False
        """Whether a lane of this worker has left something to be carried on, in the step under way."""
        self.sight: GradientSight | None = None
        self.awaits: Callable[[int, int], None] = _nothing
        """Told which bucket, of how many, is awaited at the end of a step."""
        self._names = [named.name for named in parameters]
        self._step: StepInFlight | None = None
        self._may_rewind = False
        self.rules = LaneRules(self.named)
        self._checkpoints = CheckpointWatch(self._notice_checkpoint)
        self._arranged = Arrangement(wire, self.named, wanted or Wanted(), self._gradient_arrived, self._bucket_full)
        self.recorder = LaneRecorder(self._arranged, self._in_flight, self._fold, self._launch)

    @property
    def shows_lanes(self) -> bool:
        """Whether somebody looks at the gradients of each lane in the step under way."""
        return self.sight is not None or self._in_flight().squares is not None or self.health.looks

    @property
    def has_kept_gradients(self) -> bool:
        """Whether something stood in `p.grad` when the step under way began."""
        return bool(self._in_flight().kept)

    @property
    def has_buffers(self) -> bool:
        return bool(self.buffers.slots)

    def addresses(self) -> tuple[int, ...]:
        """Where parameters and buffers stand now."""
        return (*(p.data_ptr() for p in self._parameters), *(slot.read().data_ptr() for slot in self.buffers.slots))

    def begin(self, plan: StepPlan) -> None:
        """Starts a step: `p.grad` is set aside, the plan goes to all workers."""
        self.keep_gradients()
        self._arranged.renew()
        if self._arranged.folds_always:
            plan = replace(plan, always_folds=True)
        rank = self._wire.world.rank
        whole = reduction(plan.assignment, plan.present)
        with told_as_lost(plan.step, "the beginning of the step"):
            agreement = Agreement(self._wire.transport, partial(self._plan_to_agree, plan))
        self._step = StepInFlight(
            plan=plan,
            fold=whole.folds[rank],
            reduction=whole,
            agreement=agreement,
            record=StepRecord.empty(plan.assignment.num_lanes, len(self._parameters), len(self.buffers.slots)),
            buckets=[] if plan.adds_nothing else self._arranged.buckets,
            buffers=self.buffers,
            health=Health(self.health, plan, self._names),
            kept={},
            launched=[],
            squares=self._squares_of(plan),
        )
        self._set_gradients_aside(self._step)
        for bucket in self._arranged.buckets:
            bucket.reset()
        self.rules.begin_step(plan)
        self._may_rewind = not plan.adds_nothing or self.health.policy == "skip"
        if self._may_rewind:
            self.buffers.begin_step()

    def begin_lane(self) -> None:
        step = self._in_flight()
        step.in_lane = True
        step.keeps_gradients, step.is_reentrant = self._paused, False
        self.rules.begin_lane(self._arranged)

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Backward passes inside may stand outside of lanes. A lane's gradients stay in `p.grad` until it ends."""
        before, self._paused = self._paused, True
        if self._step is not None:
            self._step.keeps_gradients = True
        try:
            yield
        finally:
            self._paused = before

    def begin_loop(self, is_first_turn: bool) -> None:
        """Before the lanes of a step, however often they are computed: what the user's code does in them is noticed."""
        self.rules.begin_loop(self._look_at_roots if is_first_turn else None)
        self._checkpoints.begin()

    def end_loop(self) -> None:
        """After them, or after what ended them."""
        self._checkpoints.end()
        self.rules.end_loop()

    def tell(self, loss: torch.Tensor, weight: float | None) -> None:
        """Notes a lane's loss and, if given, the weight by which the lane counts: SUMMED for a loss that is a sum."""
        step = self._step
        assert step is not None
        lane = step.lane
        before = step.record.weights[lane]
        if lane in step.losses and before != weight:
            raise Misuse(
                f"a loss of lane {lane} was told by {_told_by(before)} and then one by {_told_by(weight)}: tell all "
                "losses of a lane alike."
            )
        step.record.weights[lane] = weight
        recording = self.recorder.recording
        step.losses.setdefault(lane, []).append(told(loss) if recording is None else recording.tell(loss))

    def end_lane(self) -> None:
        """Folds what the lane left in `p.grad`."""
        step = self._step
        assert step is not None
        self.rules.end_lane(step, self._arranged)
        if step.plan.adds_nothing:
            self._copy_own_gradients()
            self._show_gradients(step, self._arranged.buckets)
            for bucket in self._arranged.buckets if self.health.looks else ():
                step.health.look(step.lane, bucket.gradients())
        else:
            for bucket in step.buckets[step.folded :]:
                self._fold(step, bucket)
            step.folded = 0
            self.buffers.end_lane(last=step.on_last_lane)
        step.in_lane = False
        step.position += 1

    def reduce(self) -> StepRecord:
        """Collective. Afterwards only `confirm` is missing; gives what all workers have told of the step."""
        step = self._in_flight()
        with told_as_lost(step.plan.step, "the end of the step"):
            record = self._exchange_records(step)
        step.weights = record.lane_weights(step.plan.shares)
        self._launch_rest(step, record)
        for number, launched in enumerate(step.launched):
            self.awaits(number, len(step.launched))
            with told_as_lost(step.plan.step, f"reduce of bucket {number}"):  # a job that could not be woken tells less
                launched.result()
        if not step.plan.adds_nothing and not self._arranged.knows_order and any(record.used):
            with told_as_lost(step.plan.step, "agreeing on the order of gradients"):
                self._arranged.learn_order(step.plan.assignment.carriers()[step.plan.present[0]])
        step.outcome = record
        return record

    def drift(self) -> Drift | None:
        """Who has drifted from the others, if this is a step in which they compare. Collective if somebody has."""
        step = self._in_flight()
        assert step.outcome is not None
        with told_as_lost(step.plan.step, "comparing the replicas"):
            drift = step.health.drift(step.outcome.healths, self._wire)
            if drift is not None:
                self._wire.reducer.closing_barrier()
        return drift

    def verdict(self) -> Verdict | None:
        """What to do with the step's gradient, if some lane's is not finite and somebody looked."""
        step = self._in_flight()
        assert step.outcome is not None
        return step.health.verdict(step.outcome.healths)

    def remark(self) -> BadLosses | None:
        """The losses told in this step that are not finite, if nobody looks at gradients and it was not said lately."""
        step = self._in_flight()
        assert step.outcome is not None
        counting = [loss if step.weights.lanes.get(lane) else None for lane, loss in enumerate(step.outcome.losses)]
        return self._remarks.on(counting, step.plan) if not self.health.looks else None

    def confirm(self) -> None:
        """Collective. Returns when every worker has the whole sum. See Note [Commit]."""
        with told_as_lost(self._in_flight().plan.step, "the commit of the step"):
            if not self._wire.reducer.closing_barrier():
                exchange_with_peers(self._wire.transport, lambda: b"\0", COMMIT)

    def hand_over(self) -> float | None:
        """Afterwards `p.grad` holds the step's gradient; gives the step's loss, if told."""
        step = self._in_flight()
        assert step.outcome is not None
        self.measured = ()
        if step.buckets or step.kept:
            with torch.no_grad():
                self._scale(step, step.outcome)
                self.measured = self._measured(step, step.outcome)
                self._hand_over(step, step.outcome)
        self._step = None
        return step.outcome.loss(step.weights)

    def abandon(self) -> None:
        """Nothing of the step under way is left: `p.grad` and buffers are as they were when it began."""
        step, self._step = self._step, None
        if step is None:
            return
        for bucket in self._arranged.buckets:
            for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
                parameter.grad = step.kept.get(slot.index)
        if self._may_rewind:
            self.buffers.rewind()

    def rewire(self) -> None:
        """The wire is another one: the next step lays its buckets out there."""
        self._arranged.rewire()

    def close(self) -> None:
        """Lets go of hooks and of the buckets' memory; what stands in `p.grad` stays."""
        self._arranged.close()

    # -- a step under way -----------------------------------------------------------------------------------

    def _in_flight(self) -> StepInFlight:
        assert self._step is not None, "no step has begun"
        return self._step

    def _plan_to_agree(self, plan: StepPlan) -> Proposal:
        facts = {
            "operation": "training step",
            "step": plan.step,
            "samples in the global batch": plan.num_samples,
            **plan.place.facts(),
            "assignment of lanes": plan.assignment.lanes_of,
            "number of buffers in the models": len(self.buffers.slots),
        }
        layout = self._arranged.layout
        return Proposal(
            facts, lambda: {**layout.describe(), **plan.place.details()}, layout.fingerprint, plan.place.judge
        )

    # -- during the lanes -----------------------------------------------------------------------------------

    def _gradient_arrived(self) -> None:
        in_lane = self._step is not None and self._step.in_lane
        if not in_lane and not self._paused:
            refuse_outside()

    def _notice_checkpoint(self) -> None:
        if self._step is not None:
            self._step.is_reentrant = True

    def _look_at_roots(self, roots: Sequence[Node]) -> None:
        step = self._step
        if step is not None and step.in_lane and self.recorder.recording is None:
            self.rules.look_at(step, roots)

    def _bucket_full(self, number: int) -> None:
        step = self._step
        if step is None or step.keeps_gradients or step.is_reentrant or not step.on_last_lane or not step.buckets:
            return
        step.full.add(number)
        while step.folded in step.full and step.buckets[step.folded].filled():
            self._fold(step, step.buckets[step.folded])
            if self.recorder.recording is None:
                self._launch(step, step.folded - 1)
            else:
                self.recorder.recording.bucket_is_full()

    def _show_gradients(self, step: StepInFlight, buckets: Sequence[Bucket]) -> None:
        if self.sight is not None:
            for bucket in buckets:
                self.sight(step.lane, bucket.gradients())

    def _fold(self, step: StepInFlight, bucket: Bucket) -> None:
        self._show_gradients(step, [bucket])
        if self.health.looks:
            step.health.look(step.lane, bucket.entering_gradients())
        if step.squares is not None:
            step.squares.look(step.lane, bucket.numbered_gradients())
        bucket.fold_lane(step.weight, step.fold.merges[step.position])
        step.folded += 1

    def _copy_own_gradients(self) -> None:
        """Where nothing is folded. See Note [Gradients are only read] in bucket.py."""
        for number, bucket in enumerate(self._arranged.buckets):
            if self._arranged.watch.has_own(number):
                bucket.copy_gradients()

    # -- at the end -----------------------------------------------------------------------------------------

    def _exchange_records(self, step: StepInFlight) -> StepRecord:
        step.agreement.check()
        mine = step.record
        mine.wishes, mine.carries = self.wishes, self.carries
        mine.health = step.health.packed()
        if step.squares is not None:
            mine.squares = step.squares.told(step.plan.assignment.num_lanes)
        for lane, losses in step.losses.items():
            mine.losses[lane] = sum(loss.read() for loss in losses)
        for bucket in step.buckets:
            for slot, used in zip(bucket.layout.slots, bucket.used, strict=True):
                mine.used[slot.index] = used
        if not step.plan.adds_nothing:
            mine.changed = self.buffers.changed()
        mine.merge(self._wire.world.rank, exchange_with_peers(self._wire.transport, mine.pack))
        return mine

    def _launch_rest(self, step: StepInFlight, record: StepRecord) -> None:
        for number in range(len(step.launched), len(step.buckets)):
            bucket = step.buckets[number]
            if any(record.used[slot.index] for slot in bucket.layout.slots):
                self._launch(step, number)
        if any(record.changed):

            def settle() -> None:
                with told_as_lost(step.plan.step, "averaging of buffers"):
                    self._settle_buffers(step, record)

            step.launched.append(self._wire.sequence.submit(settle))

    def _launch(self, step: StepInFlight, number: int, after: torch.cuda.Event | None = None) -> None:
        """Hands a bucket to the wire; on a GPU its gradients are there `after` an event, or after all so far."""
        bucket, is_last = step.buckets[number], number == len(step.buckets) - 1
        add = self._wire.reducer.reduce_unclosed if is_last else self._wire.reducer.reduce

        def reduce() -> None:
            with told_as_lost(step.plan.step, f"reduce of bucket {number}"):
                step.agreement.check()
                add(step.reduction, bucket.roots(), bucket.total)

        step.launched.append(self._wire.sequence.submit(reduce, after))

    def _settle_buffers(self, step: StepInFlight, record: StepRecord) -> None:
        shares = step.plan.shares
        weights = [shares[lane] / step.plan.num_samples for lane in step.fold.lanes]
        self.buffers.average(self._wire, step.reduction, weights, step.plan.present[0], record.changed)

    def _scale(self, step: StepInFlight, record: StepRecord) -> None:
        """See Note [Scale of told weights] in step.py."""
        for bucket in step.buckets if step.scale != 1.0 else ():
            if any(record.used[slot.index] for slot in bucket.layout.slots):
                bucket.total.mul_(step.scale)

    def _squares_of(self, plan: StepPlan) -> Squares | None:
        if plan.adds_nothing or not self.squares.taken_in(plan.step, len(plan.present)):
            return None
        return Squares(self._parameters, None if self.squares.weigh is None else self.squares.weigh())

    def _measured(self, step: StepInFlight, record: StepRecord) -> tuple[StepSquares | None, ...]:
        if step.squares is None:
            return ()
        whole = {
            slot.index: view
            for bucket in step.buckets
            for slot, view in zip(bucket.layout.slots, bucket.views, strict=True)
            if record.used[slot.index]
        }
        squares = step.squares.whole(whole)
        if step.weights.summed:
            return of_all(*as_means(record.squares, squares, step.plan.shares))
        return of_all(record.squares, step.weights.lanes, squares)

    def _hand_over(self, step: StepInFlight, record: StepRecord) -> None:
        """Puts the sum, and what was set aside before the step, into `p.grad`."""
        if step.plan.adds_nothing:
            for index, before in step.kept.items():
                grad = self._parameters[index].grad  # only read: see Note [Gradients are only read] in bucket.py
                self._parameters[index].grad = before if grad is None else before.add_(grad)
        for bucket in step.buckets:
            bucket.finish()
            for slot, parameter, view in zip(bucket.layout.slots, bucket.parameters, bucket.result.views, strict=True):
                kept = step.kept.get(slot.index)
                if not record.used[slot.index]:
                    parameter.grad = kept
                else:
                    parameter.grad = view if kept is None else view.add_(kept)

    def keep_gradients(self) -> None:
        """What stands in `p.grad` may be a view of a bucket, which the step writes to, or lays out anew: now a copy."""
        for parameter in self._parameters:
            if parameter.requires_grad and parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()

    def _set_gradients_aside(self, step: StepInFlight) -> None:
        for bucket in self._arranged.buckets:
            for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
                if parameter.grad is not None:
                    step.kept[slot.index] = parameter.grad
                    parameter.grad = None


def _told_by(weight: float | None) -> str:
    how = 'reduction="sum"' if weight == SUMMED else f"weight={weight}"
    return "run.backward(loss)" if weight is None else f"run.backward(loss, {how})"
