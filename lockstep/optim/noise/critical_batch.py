"""What a batch costs in steps and in samples, seen from the critical batch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import BadArgument
from lockstep.optim.noise.estimate import positive

LEAST_POINTS = 3


@dataclass(frozen=True)
class Effort:
    """What it takes to reach a given loss."""

    steps: float
    samples: float


def steps_and_samples(batch: float, critical: float, *, least_steps: float = 1.0, least_samples: float = 1.0) -> Effort:
    """The steps and samples that a batch needs, as multiples of the least of each unless those are given.

    McCandlish et al. 2018: S = S_min·(1 + B_crit/B), E = E_min·(1 + B/B_crit). Since E = B·S, the two least values are
    bound to each other by E_min = B_crit·S_min. At the critical batch both are twice the least.
    """
    ratio = positive("batch", batch) / positive("critical", critical)
    return Effort(
        steps=positive("least_steps", least_steps) * (1 + 1 / ratio),
        samples=positive("least_samples", least_samples) * (1 + ratio),
    )


@dataclass(frozen=True)
class Fit:
    """E = least·(1 + B/critical) through `points` measured batches; `worst_error` is the largest relative miss."""

    least: float
    critical: float
    points: int
    worst_error: float

    def predict(self, batch: float) -> float:
        """The samples that a batch needs, in the unit of the points."""
        return steps_and_samples(batch, self.critical, least_samples=self.least).samples


def fit_samples(points: Mapping[float, float]) -> Fit:
    """The curve nearest to measured samples (or epochs) by batch, each point counting by its relative error.

    With E = a + c·B, a = E_min and c = E_min/B_crit, the sum of ((a + c·B_i)/E_i − 1)² is least squares with weights
    1/E_i², linear in a and c: two normal equations, no search.
    """
    if len(points) < LEAST_POINTS:
        raise BadArgument(f"a fit needs {LEAST_POINTS} batches or more, not {len(points)}: measure at more batches")
    measured = {positive("batch", b): positive(f"samples at batch {b}", e) for b, e in points.items()}
    least, slope = _line(measured)
    largest = max(measured)
    # What rounding alone can make of a flat or a proportional curve counts as zero.
    if least <= 1e-9 * slope * largest:
        raise BadArgument(
            "samples grow as fast as the batch or faster: every batch is past the critical one, add smaller"
        )
    if slope * largest <= 1e-9 * least:
        raise BadArgument("samples do not grow with the batch: every batch is far below the critical one, add larger")
    worst = max(abs((least + slope * batch) / samples - 1) for batch, samples in measured.items())
    return Fit(least, least / slope, len(measured), worst)


def _line(measured: Mapping[float, float]) -> tuple[float, float]:
    """a and c of E = a + c·B, least squares in relative error."""
    scale = max(measured)  # batches near 1, so that the determinant below loses no digits to units
    rows = [(1 / samples, batch / scale / samples) for batch, samples in measured.items()]
    aa, ac, cc = (math.fsum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, c = (math.fsum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * cc - ac * ac
    return (a * cc - c * ac) / determinant, (aa * c - ac * a) / determinant / scale
