"""Workers on CPUs: those of a host map one memory, in which parameters, optimizer state and gradients stand once."""

from collections.abc import Mapping, Sequence

import torch
from torch.optim import Optimizer

from lockstep.events import Events
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.layout import Layout
from lockstep.gradients.step import StepInFlight
from lockstep.strategies.protocol import EngineOptions
from lockstep.strategies.sharded.engine import ShardedEngine
from lockstep.strategies.sharded.gradients import once_buckets
from lockstep.strategies.sharded.on_host import HostOptimizer
from lockstep.strategies.sharded.once import Form, OnceTensors, hold_once
from lockstep.strategies.sharded.optimizer import ShardedOptimizer
from lockstep.wire import Wire
from lockstep.wire.generation import Generation


class HostEngine(ShardedEngine):
    """The parameters of all workers of a host are views of one memory."""

    def __init__(self, options: EngineOptions, generation: Generation, events: Events, shares_gradients: bool) -> None:
        self._once: OnceTensors | None = None
        """The parameters."""
        super().__init__(options, generation, events, shares_gradients)

    def _once_buckets(
        self, wire: Wire, layout: Layout, parameters: Sequence[torch.nn.Parameter]
    ) -> Sequence[Bucket] | None:
        return once_buckets(wire, layout, parameters)

    def _may_lend(self, step: StepInFlight) -> bool:
        return len(step.fold.lanes) <= 1

    def _holds_parameters(self) -> bool:
        once, parameters = self._once, self.replicas.parameters
        if once is None or len(once.views) != len(parameters):
            return False
        views = (once.views.get(named.name) for named in parameters)
        return all(
            view is not None and named.parameter.data_ptr() == view.data_ptr()
            for named, view in zip(parameters, views, strict=True)
        )

    @torch.no_grad()
    def _hold_parameters(self) -> None:
        named = {one.name: one.parameter for one in self.replicas.parameters}
        once = hold_once(self._wire, {name: Form.of(parameter) for name, parameter in named.items()}, named)
        for name, parameter in named.items():
            parameter.data = once.views[name]
        self._once = once
        for sharded in self._sharded.values():
            sharded.close()
        self._sharded = {}

    def _make_optimizer(self, optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> ShardedOptimizer:
        assert self._once is not None
        return HostOptimizer(optimizer, names, self._once, self._wire)
