"""What `run.captured` returns, and when a lane or an update cannot be captured because of the run."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.capture.lanes import CaptureContext, CapturedLanes
from lockstep.capture.update import CapturedUpdate
from lockstep.errors import BadArgument
from lockstep.events import Events
from lockstep.settings.options import Settings
from lockstep.state.models import Models
from lockstep.strategies.protocol import StepEngine


@dataclass
class Captures:
    """All that a run has captured. One owner, who calls `close`."""

    settings: Settings
    models: Models
    events: Events
    engine: StepEngine
    misplaced: Callable[[], str | None]
    """What is wrong with where the script is now, if it is not in the lanes of a training step."""
    own_hooks: Callable[[], set[int]]
    """The numbers of the hooks that the run has on its optimizers."""

    def __post_init__(self) -> None:
        self._lanes: list[CapturedLanes] = []
        self._updates: dict[int, CapturedUpdate] = {}
        self._modules: list[torch.nn.Module] = []
        self._modules_of: object = None

    def capture(self, fn: Callable[..., Any], optimizer: Optimizer | None) -> CapturedLanes:
        if not callable(fn):
            raise BadArgument(f"run.captured takes a function that computes a lane, not {type(fn).__name__}")
        if optimizer is not None:
            self._capture_update(optimizer)
        self.engine.records_lanes = self.settings.device.type == "cuda"
        context = CaptureContext(self.engine, self._obstacle, self._modes, self.events.note, self.settings.device)
        self._lanes.append(CapturedLanes(fn, context))
        return self._lanes[-1]

    def close(self) -> None:
        for update in reversed(self._updates.values()):
            update.close()
        for lanes in self._lanes:
            lanes.close()

    def _capture_update(self, optimizer: Optimizer) -> None:
        if not any(known is optimizer for known in self.models.optimizers.values()):
            raise BadArgument("run.captured takes an optimizer that run.replicate was given before")
        device = self.settings.device
        if device.type == "cuda" and id(optimizer) not in self._updates:
            self._updates[id(optimizer)] = CapturedUpdate(optimizer, device, self.events.note, self.own_hooks)

    def _obstacle(self) -> str | None:
        if self.settings.device.type != "cuda":
            return f"the run is on {self.settings.device}, and graphs are for CUDA"
        if (misplaced := self.misplaced()) is not None:
            return f"it is called {misplaced}"
        if self.engine.statistics is not None:
            return "synchronised batch norm talks to the other workers in the middle of it"
        if self.settings.not_finite != "keep":
            return f"not_finite={self.settings.not_finite!r} looks at the gradients of every lane"
        return None

    def _modes(self) -> Hashable:
        """Asked for every lane, so modules are looked for once for the replicas that the engine holds."""
        engine = self.engine
        if engine.replicas is not self._modules_of:
            self._modules_of = engine.replicas
            self._modules = [module for root in self.models.modules.values() for module in root.modules()]
        training = tuple([module.training for module in self._modules])
        return training, engine.addresses(), torch.is_inference_mode_enabled()
