"""Measurements of noise for tests, made up: as sure or unsure, plain or as Adam sees it, as a test wants them."""

import math

from lockstep.events import NoiseMeasured
from lockstep.optim.noise import Noise


def noise(
    critical: float = 812, *, batch: float = 256, count: int = 40, width: float = 1.34, preconditioned: bool = False
) -> Noise:
    return Noise(
        step=500,
        batch=batch,
        count=count,
        left_out=0,
        effective=float(count),
        gradient_square=2.0,
        variance=2.0 * critical,
        low=0.0 if math.isinf(width) else critical / width,
        high=critical * width,
        preconditioned=preconditioned,
    )


def measured(step: int = 500, plain: Noise | None = None, adam: Noise | None = None, lanes: int = 8) -> NoiseMeasured:
    """By an SGD, or by an Adam that sees `adam`."""
    return NoiseMeasured(lanes, "sgd" if adam is None else "adam", plain or noise(), adam, step=step)
