"""Do the sides compute the same? A faster wrong answer is worth nothing, so this comes before any timing.

# Note [What agrees]
# Sums in another order differ by rounding. The gradient of the first step shows that sharply: about 1e-6 of
# its size, for each parameter. AdamW divides by the gradient's own size, so where a gradient is itself only
# rounding its update may have any sign. After some steps, therefore, only the whole way that the parameters
# went is compared, and more loosely: two sides that trained on different things end about as far apart as they
# went. A model with BatchNorm normalises each share by itself: lockstep's lanes and DDP's ranks are the same
# shares and must agree; the plain loop, on the whole batch, computes something else.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lockstep.programs.bench import plan
from lockstep.programs.bench.sides import Side
from lockstep.programs.models import Workload

NUM_STEPS = 3
GRADIENT_TOLERANCE = 1e-4
MOVEMENT_TOLERANCE = 5e-2


@dataclass(frozen=True)
class Evidence:
    """What a side computed, by name: the gradients of its first step, and how far each parameter went in all."""

    gradients: Mapping[str, Tensor]
    movement: Mapping[str, Tensor]


def take_evidence(side: Side) -> Evidence:
    """Trains a few steps from the initial weights. Collective, unless the side is `alone`."""
    side.restart()
    with side.conditions():
        side.compute(0)
        gradients = side.gradients()
        side.update()
        for number in range(1, NUM_STEPS):
            side.step(number)
    return Evidence(gradients, side.movement())


def comparable(workload: Workload, num_workers: int) -> tuple[str, ...]:
    """The sides that must agree with lockstep. See Note [What agrees]."""
    per_share = workload.per_share_statistics and num_workers > 1
    sharing = (plan.DDP, plan.ON_BACKEND)
    return sharing if per_share else (*sharing, plan.ONE_THREAD, plan.ALL_THREADS)


@dataclass(frozen=True)
class Difference:
    """How far a side is from lockstep, relative to lockstep's own size; infinite if something is missing."""

    gradients: float
    guilty: str
    movement: float


def compare(side: Evidence, reference: Evidence) -> Difference:
    """The largest difference of any one gradient, with its name, and that of the movement as a whole."""
    odd = sorted(side.gradients.keys() ^ reference.gradients.keys())
    if odd:
        return Difference(math.inf, odd[0], math.inf)
    each = {name: _relative([side.gradients[name]], [wanted]) for name, wanted in reference.gradients.items()}
    guilty = max(each, key=each.__getitem__)
    names = list(reference.movement)
    whole = _relative([side.movement[name] for name in names], [reference.movement[name] for name in names])
    return Difference(each[guilty], guilty, whole)


def refusal(side: str, difference: Difference, model: str, rank: int) -> str | None:
    """The sentence that stops the benchmark, or None if the side agrees with lockstep to rounding."""
    where = f"{model}: {side} and lockstep disagree on worker {rank}"
    if not difference.gradients <= GRADIENT_TOLERANCE:
        return (
            f"{where}: the gradient of {difference.guilty} in the first step differs by "
            f"{difference.gradients:.1e} of its size, more than {GRADIENT_TOLERANCE:.0e}. Nothing was timed"
        )
    if not difference.movement <= MOVEMENT_TOLERANCE:
        return (
            f"{where}: after {NUM_STEPS} steps the parameters are apart by {difference.movement:.1e} "
            f"of the way they went, more than {MOVEMENT_TOLERANCE:.0e}. Nothing was timed"
        )
    return None


def _relative(tensors: list[Tensor], wanted: list[Tensor]) -> float:
    """‖tensors − wanted‖ / ‖wanted‖ over all of them; NaN and infinity count as an infinite difference."""
    pairs = list(zip(tensors, wanted, strict=True))
    apart = sum(float((one.double() - other.double()).square().sum()) for one, other in pairs)
    size = sum(float(other.double().square().sum()) for _, other in pairs)
    if apart == 0:
        return 0.0
    return math.sqrt(apart / size) if size and math.isfinite(apart + size) else math.inf
