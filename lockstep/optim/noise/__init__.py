"""The noise of the gradient, and what follows from it.

- `estimate`         the noise scale: one step's measurement, smoothed over many, with an interval
- `preconditioner`   gradients as an adaptive optimizer sees them
- `watch`            the estimates of a run, step after step
- `critical_batch`   what a batch costs in steps and in samples
- `advice`           what to do with more workers, in words
"""

from lockstep.optim.noise.estimate import Measured, Noise, NoiseScale, StepSquares, measure

__all__ = ["Measured", "Noise", "NoiseScale", "StepSquares", "measure"]
