"""AdaScale: a learning rate that follows the gradient's noise when the batch grows, for SGD."""

import math
from collections.abc import Mapping
from typing import Any

from lockstep.errors import BadArgument
from lockstep.optim.noise.estimate import Measured, positive

_KEPT = ("base_batch", "smoothing", "count", "iterations", "weight", "gradient_square", "variance")


class AdaScale:
    """The gain of each step over a step of the base batch, and the base steps that the run is worth so far.

    Johnson et al. 2020. A rate is known to be good for `base_batch` samples a step; a step now has S times as many.
    With σ² the variance of the gradient of one base batch and μ² the square of the true gradient,

        r_t = (σ² + μ²) / (σ²/S + μ²)      in [1, S]
        η_t = r_t·lr(⌊τ_t⌋)                τ_{t+1} = τ_t + r_t

    where `lr` is the schedule of the base run, read at the scale-invariant iteration τ (`iterations`), and the run ends
    when τ reaches the base run's number of steps. All noise, μ² = 0, gives r = S, the linear rule; none gives r = 1.

    σ² and μ² are moving averages with the paper's θ = max(1 − S/1000, 0) unless `smoothing` is given, each taken from
    the mean of all lanes, so there need not be S lanes. In `Measured` the variance is that of one sample:
    σ² = variance/base_batch. Averages below 0 count as 0.
    """

    def __init__(self, base_batch: float, *, smoothing: float | None = None) -> None:
        if smoothing is not None and not (isinstance(smoothing, int | float) and 0 <= smoothing < 1):
            raise BadArgument(f"smoothing must be 0 or more and below 1, or None for the paper's, not {smoothing!r}")
        self.base_batch = positive("base_batch", base_batch)
        self.smoothing = smoothing
        self.count = 0
        self.iterations = 0.0
        self.weight = 0.0
        self.gradient_square = 0.0
        self.variance = 0.0

    def gain(self, batch: float, measured: Measured) -> float:
        """The gain r of the step of `batch` samples that was measured so; the step's rate is lr·r. Call once a step.

        `iterations` has advanced by r. A measurement that is not finite is left out: the averages stay as they were.
        A batch below the base batch has S and r below 1.
        """
        scale = positive("batch", batch) / self.base_batch
        if math.isfinite(measured.gradient_square) and math.isfinite(measured.variance):
            self._average(measured, max(1 - scale / 1000, 0.0) if self.smoothing is None else self.smoothing)
        gain = self._ratio(scale)
        self.iterations += gain
        return gain

    def state_dict(self) -> dict[str, Any]:
        """All that is kept, as plain numbers (and None for the paper's smoothing)."""
        return {name: getattr(self, name) for name in _KEPT}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state, base batch and smoothing included."""
        odd = sorted(set(state) ^ set(_KEPT))
        if odd:
            raise BadArgument(f"this is not the state of an AdaScale, which has other keys: {', '.join(odd)}")
        for name in _KEPT:
            setattr(self, name, state[name])

    def _average(self, measured: Measured, theta: float) -> None:
        """Moves the averages, whose weights are divided by their own sum so that the first value is no pull to 0."""
        self.weight = theta * self.weight + 1
        self.gradient_square += (measured.gradient_square - self.gradient_square) / self.weight
        self.variance += (measured.variance - self.variance) / self.weight
        self.count += 1

    def _ratio(self, scale: float) -> float:
        sigma, mu = max(self.variance, 0.0) / self.base_batch, max(self.gradient_square, 0.0)
        if sigma + mu == 0:
            return 1.0
        return min(max((sigma + mu) / (sigma / scale + mu), min(scale, 1.0)), max(scale, 1.0))
