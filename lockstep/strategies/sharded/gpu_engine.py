"""Workers on GPUs: each has its parameters, and the state of those that it updates.

`OffloadEngine` is that of "parameters", under which these leave the GPU while lanes are computed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.optim import Optimizer

from lockstep.errors import naming_lost_worker
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.layout import Layout
from lockstep.gradients.plan import StepPlan
from lockstep.gradients.record import StepRecord
from lockstep.gradients.step import StepInFlight
from lockstep.strategies.protocol import Replicas
from lockstep.strategies.sharded.engine import ShardedEngine, UpdateProposal
from lockstep.strategies.sharded.host_sums import host_buckets
from lockstep.strategies.sharded.offload import ParameterOffload, has_compiled_code
from lockstep.strategies.sharded.on_gpu import GpuOptimizer
from lockstep.strategies.sharded.optimizer import ShardedOptimizer
from lockstep.wire import Proposal, Wire
from lockstep.wire.generation import Generation

NOT_PINNED = "the memory of the host could not be pinned: updates take longer"


class GpuEngine(ShardedEngine):
    """Optimizer state is divided among the workers of a host; the sum of the gradients may stand in its memory."""

    _offload: ParameterOffload | None = None

    def _plan_to_agree(self, plan: StepPlan) -> Proposal:
        """Wires of GPUs need to know it: see Note [What may be remembered] in wire/cuda/ipc.py."""
        proposal = super()._plan_to_agree(plan)
        if not self._shares_gradients:
            return proposal
        facts = {**proposal.facts, "run.captured was called": self.records_lanes}
        return replace(proposal, facts=facts)

    def _once_buckets(
        self, wire: Wire, layout: Layout, parameters: Sequence[torch.nn.Parameter]
    ) -> Sequence[Bucket] | None:
        return host_buckets(wire, layout, parameters) if wire.world.size > 1 else None

    def _may_lend(self, step: StepInFlight) -> bool:
        return step.plan.assignment.most_lanes == 1 and not self.records_lanes

    def _make_optimizer(self, optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> ShardedOptimizer:
        sharded = GpuOptimizer(optimizer, names, self._wire, self._offload)
        if not sharded.is_pinned:
            self._events.note(NOT_PINNED, one_worker=True)
        return sharded

    def _updates_alone(self, optimizer: Optimizer) -> bool:
        if self._wire.world.size > 1:
            return False
        sharded = self._sharded.pop(id(optimizer), None)
        if isinstance(sharded, GpuOptimizer):
            sharded.dissolve()
        return True

    def _heal(self, optimizer: Optimizer, proposals: Mapping[int, UpdateProposal]) -> bool:
        """Each worker has its own parameters: a flipped bit may have changed some."""
        sharded = self._of(optimizer)
        (usual, count), *_ = Counter(proposals.values()).most_common()
        if not isinstance(sharded, GpuOptimizer) or 2 * count <= len(proposals):
            return False
        if any(one.gradients != usual.gradients for one in proposals.values()):
            return False
        odd = sorted(rank for rank, one in proposals.items() if one != usual)
        if self._wire.world.rank in odd:
            sharded.reset_parameters()
        self._events.note(
            f"! before optimizer.step(): the parameters of worker {', '.join(map(str, odd))} differ from those of the "
            "others, and are again what the last update has left. If the script itself changes them, `lockstep verify "
            "SCRIPT` shows where."
        )
        return True


class OffloadEngine(GpuEngine):
    """Parameters leave the GPU in the lanes of a step. See Note [Away during the forward pass] in offload.py."""

    _offload: ParameterOffload
    _is_first_turn = _said_they_stay = False

    def _set_up(self, replicas: Replicas, generation: Generation) -> None:
        super()._set_up(replicas, generation)
        self._offload = ParameterOffload(replicas)

    # -- a step ---------------------------------------------------------------------------------------------

    def begin_loop(self, is_first_turn: bool) -> None:
        self._is_first_turn = is_first_turn
        super().begin_loop(is_first_turn)

    def begin(self, plan: StepPlan, generation: Generation) -> None:
        super().begin(plan, generation)
        if generation.world.size == 1 or not self.replicas.parameters:
            return
        if self._offload.wire is not generation.wire:
            with naming_lost_worker(plan.step, "the beginning of the step"):
                self._hold_parameters()
        if self._may_leave():
            optimizers = [sharded for sharded in self._sharded.values() if isinstance(sharded, GpuOptimizer)]
            views = sum((sharded.num_views() for sharded in optimizers), Counter[int]())
            self._offload.begin(views, self._is_first_turn or self._options.health.compares_in(plan))

    def begin_lane(self) -> None:
        super().begin_lane()
        self._offload.enter()

    def end_lane(self) -> None:
        self._offload.leave()
        super().end_lane()

    def reduce(self, requests: Sequence[bool], carries: bool) -> StepRecord:
        self._offload.finish()
        return super().reduce(requests, carries)

    def abandon(self) -> None:
        self._offload.finish()
        super().abandon()

    def end_loop(self) -> None:
        self._offload.finish()
        super().end_loop()

    def _may_leave(self) -> bool:
        """Not where code has noted their addresses."""
        cause = "run.captured" if self.records_lanes else "torch.compile" if has_compiled_code() else None
        if cause is not None and not self._said_they_stay:
            self._said_they_stay = True
            text = f'the script has called {cause}: parameters stay on the GPU, as with strategy="sharded:gradients"'
            self._events.note(text, one_worker=True)
        return cause is None

    # -- an update ------------------------------------------------------------------------------------------

    def _proposal(self, optimizer: Optimizer) -> UpdateProposal:
        self._offload.check()
        return super()._proposal(optimizer)

    def _holds_parameters(self) -> bool:
        return self._offload.holds(self._wire)

    def _hold_parameters(self) -> None:
        self._offload.hold(self._wire)
        if not self._offload.is_pinned:
            self._events.note(NOT_PINNED + ", and parameters stay on the GPU", one_worker=True)

    def after_update(self, optimizer: Optimizer) -> None:
        sharded = None if self._under_way is None else self._of(optimizer)
        super().after_update(optimizer)
        if isinstance(sharded, GpuOptimizer):
            self._offload.take_updated(sharded.updated_names)
