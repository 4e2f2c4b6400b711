"""Plain data parallelism: every worker holds all of the model, adds all gradients, and makes every update.

# Note [Commit]
# Once its own slices of all sums are written, a worker signals *prepared* to all; it hands the sum over only after all
# have signalled: no worker can then be left without it. In shared memory the closing barrier of the last bucket is the
# signal (Note [Closing late] in wire/shared/reducer.py), elsewhere a message. If an exchange fails before, nothing of
# the step is handed over, and `abandon` undoes it. If it fails after this worker has signalled, others may have gone
# past the step: the survivors decide it together (see lockstep/elastic/membership).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.optim import Optimizer

from lockstep.errors import Misuse, naming_lost_worker
from lockstep.events import Events, LaneGradients, Wait, WaitBegan, WaitEnded
from lockstep.gradients.batchnorm import Statistics, connect, norms_by_lane
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.bucket_set import BucketSet, own_buckets
from lockstep.gradients.buffers import LaneBuffers
from lockstep.gradients.fingerprint import Drift
from lockstep.gradients.finite import BadLosses, NotFiniteVerdict
from lockstep.gradients.health import Remarks, StepHealth
from lockstep.gradients.hooks import CheckpointWatch
from lockstep.gradients.layout import Layout
from lockstep.gradients.marks import LaneMarks
from lockstep.gradients.pipeline import BucketPipeline
from lockstep.gradients.plan import StepPlan
from lockstep.gradients.record import SUMMED, StepRecord, lane_loss
from lockstep.gradients.recorder import LaneRecorder
from lockstep.gradients.rules import LaneRules, refuse_outside
from lockstep.gradients.squares import Squares, as_means, of_all
from lockstep.gradients.step import StepInFlight
from lockstep.lanes import reduction
from lockstep.optim.noise import StepSquares
from lockstep.strategies.protocol import EngineOptions, Replicas, StepEngine
from lockstep.wire import Agreement, Proposal, Wire, exchange_with_peers
from lockstep.wire.generation import Generation
from lockstep.wire.transport import COMMIT


@dataclass(frozen=True)
class Replicated:
    """Every worker holds the whole model, its gradients and its optimizer state."""

    def __str__(self) -> str:
        return "replicated"

    def engine(self, options: EngineOptions, generation: Generation, events: Events) -> StepEngine:
        return ReplicatedEngine(options, generation, events)


class ReplicatedEngine(StepEngine):
    """The gradients of all replicated models: folds lanes into buckets and reduces them while backward goes on."""

    def __init__(
        self, options: EngineOptions, generation: Generation, events: Events, pipeline: BucketPipeline | None = None
    ) -> None:
        self._options, self._events = options, events
        self._pipeline = pipeline or BucketPipeline(events)
        self._paused = False
        self._remarks = Remarks()
        self.measured: tuple[StepSquares | None, ...] = ()
        self._step: StepInFlight | None = None
        self._may_rewind = False
        self.records_lanes = False
        self._checkpoints = CheckpointWatch(self._notice_checkpoint)
        self._set_up(Replicas(), generation)

    def hold(self, replicas: Replicas, generation: Generation) -> None:
        self.close()
        self._set_up(replicas, generation)

    def _set_up(self, replicas: Replicas, generation: Generation) -> None:
        self.replicas = replicas
        self._parameters = [named.parameter for named in replicas.parameters]
        self._names = [named.name for named in replicas.parameters]
        self.look_at_buffers()
        self.statistics: Statistics | None = connect(replicas.modules, self._events)
        self.rules = LaneRules(replicas.parameters, self._events.note)
        self._buckets = BucketSet(
            generation.wire, replicas.parameters, self._options.buckets,
            self._gradient_arrived, self._bucket_is_full, self._make_buckets,
        )  # fmt: skip
        self.recorder = LaneRecorder(self._buckets, self._in_flight, self._pipeline)

    def look_at_buffers(self) -> None:
        self.buffers = LaneBuffers(list(self.replicas.modules), list(self.replicas.prefixes))
        self._norms_by_lane = bool(norms_by_lane(self.replicas.modules))

    @property
    def min_samples(self) -> int:
        """See Note [No lane with a single sample] in lanes.py."""
        return 2 if self._norms_by_lane else 1

    @property
    def shows_lanes(self) -> bool:
        step, is_read = self._in_flight(), self._events.has_readers(LaneGradients)
        return is_read or step.squares is not None or step.marks is not None or self._options.health.looks

    @property
    def has_kept_gradients(self) -> bool:
        return bool(self._in_flight().kept)

    def addresses(self) -> tuple[int, ...]:
        return (*(p.data_ptr() for p in self._parameters), *(slot.read().data_ptr() for slot in self.buffers.slots))

    def begin(self, plan: StepPlan, generation: Generation) -> None:
        self.keep_gradients()
        self._buckets.renew(generation.wire)
        if self._buckets.must_fold:
            plan = replace(plan, always_folds=True)
        if self.statistics is not None:
            self.statistics.begin(plan, generation.wire.transport)
        whole = reduction(plan.assignment, plan.present)
        with naming_lost_worker(plan.step, "the beginning of the step"):
            agreement = Agreement(generation.wire.transport, partial(self._plan_to_agree, plan))
        self._step = StepInFlight(
            plan=plan,
            generation=generation,
            fold=whole.folds[generation.world.rank],
            reduction=whole,
            agreement=agreement,
            record=StepRecord.empty(plan.assignment.num_lanes, len(self._parameters), len(self.buffers.slots)),
            buckets=[] if plan.has_nothing_to_add else self._buckets.buckets,
            buffers=self.buffers,
            health=StepHealth(self._options.health, plan, self._names),
            kept={},
            launched=[],
            squares=self._squares_of(plan),
            marks=LaneMarks() if plan.marks_lanes else None,
        )
        self._step.kept = self._buckets.set_aside()
        for bucket in self._buckets.buckets:
            bucket.reset()
        self.rules.begin_step(plan)
        self._may_rewind = not plan.has_nothing_to_add or self._options.health.policy == "skip"
        if self._may_rewind:
            self.buffers.begin_step()

    def begin_lane(self) -> None:
        step = self._in_flight()
        step.in_lane, step.lane_began_s = True, time.monotonic()
        step.keeps_gradients, step.is_reentrant = self._paused, False
        self.rules.begin_lane(self._buckets)
        if self.statistics is not None:
            self.statistics.weight = step.plan.shares[step.lane]

    @contextmanager
    def pausing(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        if self._step is not None:
            self._step.keeps_gradients = True
        try:
            yield
        finally:
            self._paused = before

    def begin_loop(self, is_first_turn: bool) -> None:
        self.rules.begin_loop(self._look_at_roots if is_first_turn else None)
        self._checkpoints.begin()

    def end_loop(self) -> None:
        self._checkpoints.end()
        self.rules.end_loop()

    def record_loss(self, loss: torch.Tensor, weight: float | None) -> None:
        step = self._step
        assert step is not None
        lane = step.lane
        before = step.record.weights[lane]
        if lane in step.losses and before != weight:
            raise Misuse(
                f"a loss of lane {lane} was given by {_call(before)} and then one by {_call(weight)}: give all "
                "losses of a lane alike."
            )
        step.record.weights[lane] = weight
        if self.statistics is not None and weight is not None:
            self.statistics.weight = weight
        taken = lane_loss(loss) if step.recording is None else step.recording.add_loss(loss)
        step.losses.setdefault(lane, []).append(taken)

    def end_lane(self) -> None:
        step = self._step
        assert step is not None
        self.rules.end_lane(step, self._buckets)
        if step.plan.has_nothing_to_add:
            self._buckets.copy_own_gradients()
            for bucket in self._buckets.buckets:
                self._pipeline.look(step, bucket, as_folded=False)
        else:
            self._pipeline.fold_rest(step)
            step.folded = 0
            self.buffers.end_lane(last=step.on_last_lane)
        step.in_lane = False
        step.record.times_s[step.lane] = time.monotonic() - step.lane_began_s
        step.position += 1

    def reduce(self, requests: Sequence[bool], carries: bool) -> StepRecord:
        step = self._in_flight()
        if self.statistics is not None and self.statistics.failure is not None:
            raise self.statistics.failure
        step.record.requests, step.record.carries = list(requests), carries
        with naming_lost_worker(step.plan.step, "the end of the step"):
            record = self._exchange_records(step)
        step.weights = record.lane_weights(step.plan.shares)
        if record.is_partial:
            self.rules.warn_of_part()
        self._launch_rest(step, record)
        for number, launched in enumerate(step.launched):
            self._events.emit(WaitBegan, Wait.STEP, number, len(step.launched), step=step.plan.step)
            with naming_lost_worker(
                step.plan.step, f"reduce of bucket {number}"
            ):  # a job that could not be woken says less
                launched.result()
        if not step.plan.has_nothing_to_add and not self._buckets.knows_order and any(record.used):
            with naming_lost_worker(step.plan.step, "agreeing on the order of gradients"):
                self._buckets.learn_order(step.plan.assignment.carriers()[step.plan.present[0]])
        step.outcome = record
        return record

    def drift(self) -> Drift | None:
        step = self._in_flight()
        assert step.outcome is not None
        with naming_lost_worker(step.plan.step, "comparing the replicas"):
            drift = step.health.drift(step.outcome.healths, step.generation.wire)
            if drift is not None:
                step.generation.wire.reducer.closing_barrier()
        return drift

    def verdict(self) -> NotFiniteVerdict | None:
        step = self._in_flight()
        assert step.outcome is not None
        return step.health.verdict(step.outcome.healths)

    def bad_losses(self) -> BadLosses | None:
        step = self._in_flight()
        assert step.outcome is not None
        counting = [loss if step.weights.lanes.get(lane) else None for lane, loss in enumerate(step.outcome.losses)]
        return self._remarks.on(counting, step.plan) if not self._options.health.looks else None

    def commit(self) -> None:
        """See Note [Commit]."""
        step = self._in_flight()
        wire = step.generation.wire
        with naming_lost_worker(step.plan.step, "the commit of the step"):
            if not wire.reducer.closing_barrier():
                exchange_with_peers(wire.transport, lambda: b"\0", COMMIT)
        self._events.emit(WaitEnded, Wait.STEP, step=step.plan.step)

    def hand_over(self) -> float | None:
        step = self._in_flight()
        assert step.outcome is not None
        self.measured = ()
        if step.buckets or step.kept:
            with torch.no_grad():
                self._scale(step, step.outcome)
                self.measured = self._measured(step, step.outcome)
                if step.plan.has_nothing_to_add:
                    self._buckets.add_kept(step.kept)
                for bucket in step.buckets:
                    bucket.hand_over(step.outcome.used, step.kept)
        self._step = None
        return step.outcome.loss(step.weights)

    def abandon(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        self._buckets.put_back(step.kept)
        if self._may_rewind:
            self.buffers.rewind()

    def withdraw(self) -> None:
        step = self._in_flight()
        with naming_lost_worker(step.plan.step, "the end of a step that is computed twice"):
            step.generation.wire.reducer.closing_barrier()
        self.abandon()

    def keep_gradients(self) -> None:
        self._buckets.keep_gradients()

    def before_update(self, optimizer: Optimizer, has_closure: bool) -> None:
        pass

    def after_update(self, optimizer: Optimizer) -> None:
        pass

    def settle(self, wire: Wire) -> None:
        pass

    def state(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        pass

    def close(self) -> None:
        self._buckets.close()

    def _make_buckets(self, wire: Wire, layout: Layout, parameters: Sequence[torch.nn.Parameter]) -> Sequence[Bucket]:
        return own_buckets(wire, layout, parameters)

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
        layout = self._buckets.layout
        return Proposal(
            facts, lambda: {**layout.describe(), **plan.place.details()}, layout.fingerprint, plan.place.judge
        )

    # -- during the lanes -----------------------------------------------------------------------------------

    def _bucket_is_full(self, number: int) -> None:
        if self._step is not None:
            self._pipeline.bucket_is_full(self._step, number)

    def _gradient_arrived(self) -> None:
        in_lane = self._step is not None and self._step.in_lane
        if not in_lane and not self._paused:
            refuse_outside()

    def _notice_checkpoint(self) -> None:
        if self._step is not None:
            self._step.is_reentrant = True

    def _look_at_roots(self, roots: Sequence[Node]) -> None:
        step = self._step
        if step is not None and step.in_lane and step.recording is None:
            self.rules.look_at(step, roots)

    # -- at the end -----------------------------------------------------------------------------------------

    def _exchange_records(self, step: StepInFlight) -> StepRecord:
        step.agreement.check()
        mine = step.record
        mine.health, mine.is_partial = step.health.packed(), self.rules.partial_mean is not None
        if step.squares is not None:
            mine.squares = step.squares.of_lanes(step.plan.assignment.num_lanes)
        if step.marks is not None:
            mine.marks = step.marks.of_lanes(step.plan.assignment.num_lanes)
        for lane, losses in step.losses.items():
            mine.losses[lane] = sum(loss.read() for loss in losses)
        for bucket in step.buckets:
            for slot, used in zip(bucket.layout.slots, bucket.used, strict=True):
                mine.used[slot.index] = used
        if not step.plan.has_nothing_to_add:
            mine.changed = self.buffers.changed()
        wire = step.generation.wire
        most_lanes = step.plan.assignment.most_lanes
        mine.merge(wire.world.rank, exchange_with_peers(wire.transport, lambda: mine.pack(most_lanes)))
        return mine

    def _launch_rest(self, step: StepInFlight, record: StepRecord) -> None:
        self._pipeline.launch_rest(step, record)
        if any(record.changed):

            def settle() -> None:
                with naming_lost_worker(step.plan.step, "averaging of buffers"):
                    self._settle_buffers(step, record)

            step.launched.append(step.generation.wire.sequence.submit(settle))

    def _settle_buffers(self, step: StepInFlight, record: StepRecord) -> None:
        shares = step.plan.shares
        weights = [shares[lane] / step.plan.num_samples for lane in step.fold.lanes]
        self.buffers.average(step.generation.wire, step.reduction, weights, step.plan.present[0], record.changed)

    def _scale(self, step: StepInFlight, record: StepRecord) -> None:
        """See Note [Scale of given weights] in step.py."""
        for bucket in step.buckets if step.scale != 1.0 else ():
            if any(record.used[slot.index] for slot in bucket.layout.slots):
                bucket.total.mul_(step.scale)

    def _squares_of(self, plan: StepPlan) -> Squares | None:
        weigh = self._options.squares.weigh
        if plan.has_nothing_to_add or not self._options.squares.taken_in(plan.step, len(plan.present)):
            return None
        return Squares(self._parameters, None if weigh is None else weigh())

    def _measured(self, step: StepInFlight, record: StepRecord) -> tuple[StepSquares | None, ...]:
        if step.squares is None:
            return ()
        squares = step.squares.whole(
            {
                slot.index: view
                for slot, view in zip(bucket.layout.slots, bucket.views, strict=True)
                if record.used[slot.index]
            }
            for bucket in step.buckets
        )
        if step.weights.summed:
            return of_all(*as_means(record.squares, squares, step.plan.shares))
        return of_all(record.squares, step.weights.lanes, squares)


def _call(weight: float | None) -> str:
    how = 'reduction="sum"' if weight == SUMMED else f"weight={weight}"
    return "run.backward(loss)" if weight is None else f"run.backward(loss, {how})"
