"""The steps of a sharded run: gradients as in plain data parallelism, parameters and optimizer state once on a host.

# Note [The two barriers of an update]
# All workers of a host read the same parameters, and each writes some of them. So an update begins when all workers
# have called `optimizer.step`: no script reads old values any more. It ends when all have made their part: no script
# reads a value before it is new. Before the first barrier every worker looks for what its script has changed itself;
# scripts are the same everywhere, so the changes must be. What a script has done to gradients shows in no worker's
# parameters alone, as each updates a part: so the gradients are compared too, in the first update and then as often as
# replicas are.

# Note [A worker lost in an update]
# A worker that has passed the first barrier makes its part and then waits at the second, so when a generation ends in
# an update every survivor stands at one of the two. If any of them has passed the first, the update is made whole while
# the next generation forms: on each host one survivor makes what is missing (Note [The journal] in ledger.py), and all
# go on behind the second barrier. If none has, they meet at the first one again.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

import torch
from torch.optim import Optimizer

from lockstep.errors import BadArgument, Disagreement, Misuse, naming_lost_worker
from lockstep.events import Events, Wait
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.layout import Layout
from lockstep.gradients.plan import StepPlan
from lockstep.gradients.record import StepRecord
from lockstep.gradients.step import StepInFlight
from lockstep.strategies.protocol import EngineOptions, Replicas
from lockstep.strategies.replicated import ReplicatedEngine
from lockstep.strategies.sharded.lent_buffers import LendingPipeline, lending_in
from lockstep.strategies.sharded.once import TOKEN_BYTES
from lockstep.strategies.sharded.optimizer import ShardedOptimizer, check_known
from lockstep.wire import Wire
from lockstep.wire.exchange import exchange_with_peers
from lockstep.wire.generation import Generation
from lockstep.wire.shared.once import check_page_table, return_freed_memory

_PROPOSAL = Struct("<B64s16s")
_POSITION = Struct(f"<??{TOKEN_BYTES}s")


class Missing(IntEnum):
    """What a worker lacks for an update, each with all before it."""

    NOTHING = 0
    PLAN = 1
    STATE = 2
    PARAMETERS = 3


@dataclass(frozen=True)
class UpdateProposal:
    """What a worker brings to the first barrier; `changes` is a digest of what its script has written itself.

    `gradients` is a fingerprint of those that it would use, where they are compared.
    """

    missing: Missing
    changes: bytes = bytes(64)
    gradients: bytes = bytes(16)

    def pack(self) -> bytes:
        return _PROPOSAL.pack(self.missing, self.changes, self.gradients)


@dataclass
class UpdateUnderWay:
    """An `optimizer.step` of this worker. See Note [The two barriers of an update]."""

    optimizer: Optimizer
    has_begun: bool = False
    """Whether this worker has passed the first barrier."""
    is_own_done: bool = False
    is_complete: bool = False
    """Whether the update was made whole while a generation formed."""


class ShardedEngine(ReplicatedEngine):
    """Adds to the replicated engine: who updates what. Its memory is made when the first update begins.

    Where things are held is said by its subclasses. `shares_gradients`: the sum of the gradients is held once too.
    """

    def __init__(self, options: EngineOptions, generation: Generation, events: Events, shares_gradients: bool) -> None:
        self._shares_gradients = shares_gradients
        self._sharded: dict[int, ShardedOptimizer] = {}
        self._under_way: UpdateUnderWay | None = None
        self._is_comparing_due = False
        self._wire = generation.wire
        check_page_table()
        self._lending_pipeline = LendingPipeline(events)
        super().__init__(options, generation, events, self._lending_pipeline)

    def hold(self, replicas: Replicas, generation: Generation) -> None:
        for named in replicas.parameters:
            there, device = named.parameter.device, self._options.device
            if there.type != device.type:
                raise BadArgument(
                    f"parameter {named.name} is on {there}, and the run's device is {device}: a sharded strategy needs "
                    "all parameters there"
                )
        self._use(generation.wire)
        super().hold(replicas, generation)

    def begin(self, plan: StepPlan, generation: Generation) -> None:
        self._use(generation.wire)
        super().begin(plan, generation)
        step = self._in_flight()
        for bucket in lending_in(step):
            bucket.lend(self._may_lend(step))

    def _use(self, wire: Wire) -> None:
        if wire.host is None and wire.world.size > 1:
            raise BadArgument(
                f"sharding needs memory that the workers of a host share, and this run's wire is {wire.how}. Start "
                'with wire="shared" on one host, wire="hierarchical" on several, or strategy="replicated".'
            )
        self._wire = wire

    # -- gradients that stand once --------------------------------------------------------------------------

    def _make_buckets(self, wire: Wire, layout: Layout, parameters: Sequence[torch.nn.Parameter]) -> Sequence[Bucket]:
        found = self._once_buckets(wire, layout, parameters) if self._shares_gradients else None
        return super()._make_buckets(wire, layout, parameters) if found is None else found

    @abstractmethod
    def _once_buckets(
        self, wire: Wire, layout: Layout, parameters: Sequence[torch.nn.Parameter]
    ) -> Sequence[Bucket] | None:
        """Collective. Buckets whose sum is held once; None if each worker holds its own."""

    @abstractmethod
    def _may_lend(self, step: StepInFlight) -> bool:
        """Whether buckets take turns in the step. See Note [Lent buffers] in lent_buffers.py."""

    def reduce(self, requests: Sequence[bool], carries: bool) -> StepRecord:
        step = self._in_flight()
        self._lending_pipeline.launch_all(step)
        record = super().reduce(requests, carries)
        with naming_lost_worker(step.plan.step, "the end of the step"):
            for bucket in lending_in(step):
                bucket.finish_own(step.scale)
        return record

    def _scale(self, step: StepInFlight, record: StepRecord) -> None:
        if not lending_in(step):
            super()._scale(step, record)

    def hand_over(self) -> float | None:
        self._is_comparing_due = self._options.health.compares_in(self._in_flight().plan)
        for bucket in lending_in(self._in_flight())[:1]:
            bucket.forget_writes()
        return super().hand_over()

    # -- an update ------------------------------------------------------------------------------------------

    def before_update(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Collective. Makes this worker's part of the update, but for the last batch, which `optimizer.step` makes."""
        if has_closure:
            raise Misuse(
                "optimizer.step(closure) under a sharded strategy: the closure would compute gradients when the update "
                "has begun. Compute them in run.lanes, and write optimizer.step()."
            )
        if self._under_way is None:
            check_known(optimizer)
            if self._updates_alone(optimizer):
                return
            self._under_way = UpdateUnderWay(optimizer)
        update = self._under_way
        if update.optimizer is not optimizer:
            raise Misuse("an optimizer.step() has failed before another one was called: the run cannot go on")
        if not update.is_complete:
            self._meet(optimizer)
            update.has_begun = True
            self._of(optimizer).begin_own()
        else:
            self._of(optimizer).begin_nothing()

    def after_update(self, optimizer: Optimizer) -> None:
        """Collective. Afterwards parameters and optimizer state are new, on every worker."""
        update = self._under_way
        if update is None:
            return
        sharded = self._of(optimizer)
        if not update.is_own_done:
            if update.has_begun:
                sharded.end_own()
            else:
                sharded.end_nothing()
            update.is_own_done = True
        if not update.is_complete:
            with self._events.waiting(Wait.UPDATE):
                exchange_with_peers(self._wire.transport, lambda: b"\0")
        sharded.conclude()
        self._under_way = None

    def settle(self, wire: Wire) -> None:
        """See Note [A worker lost in an update]."""
        self._use(wire)
        update = self._under_way
        sharded = None if update is None else self._sharded.get(id(update.optimizer))
        token = bytes(TOKEN_BYTES) if sharded is None else sharded.token
        mine = _POSITION.pack(update is not None, update is not None and update.has_begun, token)
        records = {**exchange_with_peers(wire.transport, lambda: mine), wire.world.rank: mine}
        positions = {rank: _POSITION.unpack(record) for rank, record in sorted(records.items())}
        if not any(has_begun for _, has_begun, _ in positions.values()):
            return
        if update is not None:
            there = [rank for rank, (is_in, _, other) in positions.items() if is_in and other == token]
            if there[0] == wire.world.rank:
                self._of(update.optimizer).finish_all()
        exchange_with_peers(wire.transport, lambda: b"\0")
        if update is not None:
            self._of(update.optimizer).restore()
            update.is_complete = True

    def close(self) -> None:
        for sharded in self._sharded.values():
            sharded.give_up()
        super().close()

    # -- what is held once ----------------------------------------------------------------------------------

    def _of(self, optimizer: Optimizer) -> ShardedOptimizer:
        return self._sharded[id(optimizer)]

    def _meet(self, optimizer: Optimizer) -> None:
        """Collective. The first barrier: all that the update needs is held once, and every worker has come."""
        was_healed = False
        while True:
            mine = self._proposal(optimizer)
            with self._events.waiting(Wait.UPDATE):
                others = exchange_with_peers(self._wire.transport, mine.pack)
            proposals = {self._wire.world.rank: mine} | {rank: _unpacked(other) for rank, other in others.items()}
            missing = max(proposal.missing for proposal in proposals.values())
            if missing is not Missing.NOTHING:
                self._provide(missing, optimizer)
            elif len(set(proposals.values())) == 1:
                return
            elif was_healed or not self._heal(optimizer, proposals):
                self._refuse_difference(proposals)
            else:
                was_healed = True

    def _proposal(self, optimizer: Optimizer) -> UpdateProposal:
        missing = self._missing(optimizer)
        if missing is not Missing.NOTHING:
            return UpdateProposal(missing)
        sharded = self._of(optimizer)
        compares = self._is_comparing_due or (sharded.is_new and self._options.health.drift_every > 0)
        gradients = sharded.gradients_fingerprint() if compares else bytes(16)
        return UpdateProposal(missing, sharded.look(), gradients)

    def _missing(self, optimizer: Optimizer) -> Missing:
        sharded = self._sharded.get(id(optimizer))
        if not self._holds_parameters():
            return Missing.PARAMETERS
        if sharded is None or sharded.is_stale():
            return Missing.STATE
        return Missing.PLAN if sharded.needs_plan(self._wire) else Missing.NOTHING

    def _provide(self, missing: Missing, optimizer: Optimizer) -> None:
        """Collective. Afterwards the workers of a host hold once what was missing."""
        if missing is Missing.PARAMETERS:
            self._hold_parameters()
        elif missing is Missing.PLAN:
            self._of(optimizer).follow(self._wire)
        else:
            if id(optimizer) in self._sharded:
                self._of(optimizer).close()
            names: dict[torch.Tensor, str] = {named.parameter: named.name for named in self.replicas.parameters}
            self._sharded[id(optimizer)] = self._make_optimizer(optimizer, names)
            return_freed_memory()  # the tensors that were this worker's own

    @abstractmethod
    def _make_optimizer(self, optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> ShardedOptimizer:
        """Collective. The workers of a host hold its state once afterwards."""

    def _holds_parameters(self) -> bool:
        """Whether the parameters are those that are held once; true if each worker has its own."""
        return True

    def _hold_parameters(self) -> None:
        """Collective. Afterwards they are."""

    def _updates_alone(self, optimizer: Optimizer) -> bool:
        """Whether this worker, which has no others, makes its updates as without sharding."""
        return False

    def _heal(self, optimizer: Optimizer, proposals: Mapping[int, UpdateProposal]) -> bool:
        """Whether workers that differ from a majority have again what their last update left."""
        return False

    def _refuse_difference(self, proposals: Mapping[int, UpdateProposal]) -> None:
        """Raises on every worker: scripts have changed parameters or state differently. Nothing is applied."""
        here = self._wire.world.rank
        other = next(rank for rank, one in proposals.items() if one != proposals[here])
        mine, theirs = proposals[here], proposals[other]
        if mine.gradients != theirs.gradients:
            raise Disagreement(
                "what scripts have left in p.grad before optimizer.step()",
                here, f"gradients with the fingerprint {mine.gradients.hex()[:16]}",
                other, f"gradients with the fingerprint {theirs.gradients.hex()[:16]}",
            )  # fmt: skip
        raise Disagreement(
            "what scripts have written to parameters or optimizer state before optimizer.step()",
            here, f"changes with the digest {mine.changes.hex()[:16]}",
            other, f"changes with the digest {theirs.changes.hex()[:16]}",
        )  # fmt: skip


def _unpacked(record: bytes) -> UpdateProposal:
    missing, changes, gradients = _PROPOSAL.unpack(record)
    return UpdateProposal(Missing(missing), changes, gradients)
