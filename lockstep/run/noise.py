"""Keeps the run's estimate of the gradient noise scale, step after step."""

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.events import Events, NoiseMeasured
from lockstep.gradients.squares import StepSquares, Weigh
from lockstep.optim.noise import Noise, NoiseScale, measure
from lockstep.optim.preconditioning import Preconditioners, family
from lockstep.state.models import Models


class NoiseWatch:
    """Takes the squares of measured steps; what it knows is the same on every worker, and is saved with the run."""

    def __init__(self, models: Models, events: Events) -> None:
        self._models = models
        self._events = events
        self._scales = _fresh()

    @property
    def noise(self) -> Noise:
        """As the run's optimizer sees it, once that is known; else the plain one."""
        plain, seen = (scale.noise for scale in self._scales)
        return seen if seen.count and family(self._models.optimizers.values()) == "adam" else plain

    def weigh(self) -> Weigh:
        """Squares as the optimizers see them in this step."""
        return Preconditioners(self._models.optimizers.values()).square

    def take(self, step: int, num_lanes: int, measured: Sequence[StepSquares | None]) -> None:
        """What a step has told, plain and as the optimizer sees it; nothing in most steps."""
        if not measured:
            return
        for scale, squares in zip(self._scales, measured, strict=True):
            if squares is not None:
                scale.add(step, sum(squares.weights.values()), measure(squares.lanes, squares.weights, squares.whole))
        plain, seen = (scale.noise for scale in self._scales)
        kind = family(self._models.optimizers.values())
        preconditioned = seen if kind == "adam" and seen.count else None
        self._events.emit(NoiseMeasured, num_lanes, kind, plain, preconditioned, step=step)

    def state_dict(self) -> list[dict[str, Any]]:
        return [scale.state_dict() for scale in self._scales]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Goes on from a saved state; from nothing if there is none."""
        self._scales = _fresh()
        for scale, saved in zip(self._scales, state, strict=False):
            scale.load_state_dict(saved)


def _fresh() -> tuple[NoiseScale, NoiseScale]:
    return NoiseScale(), NoiseScale(preconditioned=True)
