"""Keeps the run's estimate of the gradient noise scale, step after step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lockstep.events import Events, NoiseMeasured
from lockstep.optim.noise.estimate import Noise, NoiseScale, StepSquares, measure
from lockstep.optim.noise.preconditioner import Preconditioners, family


class NoiseWatch:
    """Takes the squares of measured steps; its estimate is the same on every worker, and is saved with the run.

    `optimizers` are those of the run, also those that are added later.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], events: Events) -> None:
        self._optimizers = optimizers
        self._events = events
        self._scales = _empty_scales()

    @property
    def noise(self) -> Noise:
        """As the run's optimizer sees it, once that is known; else the plain one."""
        plain, preconditioned = (scale.noise for scale in self._scales)
        return preconditioned if preconditioned.count and self._family == "adam" else plain

    def weigh(self) -> Callable[[Tensor, Tensor], Tensor | None]:
        """Returns the function that squares a parameter's gradient as its optimizer sees it in this step."""
        return Preconditioners(self._optimizers.values()).square

    def take(self, step: int, num_lanes: int, measured: Sequence[StepSquares | None]) -> None:
        """What was measured in a step, plain and as the optimizer sees it; nothing in most steps."""
        if not measured:
            return
        for scale, squares in zip(self._scales, measured, strict=True):
            if squares is not None:
                scale.add(step, sum(squares.weights.values()), measure(squares.lanes, squares.weights, squares.whole))
        plain, preconditioned = (scale.noise for scale in self._scales)
        kind = self._family
        is_known = kind == "adam" and preconditioned.count
        self._events.emit(NoiseMeasured, num_lanes, kind, plain, preconditioned if is_known else None, step=step)

    def state_dict(self) -> list[dict[str, Any]]:
        return [scale.state_dict() for scale in self._scales]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restores a saved state; starts empty if there is none."""
        self._scales = _empty_scales()
        for scale, saved in zip(self._scales, state, strict=False):
            scale.load_state_dict(saved)

    @property
    def _family(self) -> str:
        return family(self._optimizers.values())


def _empty_scales() -> tuple[NoiseScale, NoiseScale]:
    return NoiseScale(), NoiseScale(preconditioned=True)
