"""What a run is made in: everything that `start` has found out before there is a run."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from lockstep.events import Events
from lockstep.gradients.bucket_set import BucketOptions
from lockstep.gradients.health import HealthPlan
from lockstep.gradients.squares import SquaresPlan
from lockstep.launch.channels.status import NoStatus, StatusWriter
from lockstep.optim.noise.watch import NoiseWatch
from lockstep.settings.environment import Overrides
from lockstep.settings.options import Settings
from lockstep.state.progress import DataProgress
from lockstep.strategies import EngineOptions, StepEngine, Strategy
from lockstep.wire.generation import Generation


@dataclass(frozen=True)
class Context:
    """What was asked for, who listens, where the launcher looks, and how to undo all of it."""

    settings: Settings
    strategy: Strategy
    overrides: Overrides
    events: Events
    status: StatusWriter | NoStatus
    undo: ExitStack
    progress: DataProgress

    def engine(self, generation: Generation, noise: NoiseWatch, state: Callable[[], dict[str, Any]]) -> StepEngine:
        """The engine of the run's strategy; `state` gives the tensors of the run by name."""
        settings = self.settings
        options = EngineOptions(
            BucketOptions(settings.bucket_bytes, settings.reduce_dtype),
            HealthPlan(state, settings.not_finite, settings.drift_every),
            SquaresPlan(settings.noise_every, noise.weigh),
            settings.device,
        )
        return self.strategy.engine(options, generation, self.events)
