"""What a side computed, and how far that is from what another did: times of a wrong result mean nothing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

Named = Mapping[str, Tensor]
NUM_STEPS = 3  # from so many steps evidence is taken


@dataclass(frozen=True)
class Evidence:
    """By parameter: its gradients, and how far it went from the initial weights."""

    gradients: Named
    movement: Named


def distance(actual: Named, expected: Named, of_zeros: float = math.inf) -> tuple[float, float]:
    """‖actual − expected‖ / ‖expected‖ and ‖actual‖ / ‖expected‖ over all parameters, added up in float64.

    Infinite where a parameter is missing or a number not finite. `of_zeros` is the first where there are only zeros.
    """
    if actual.keys() != expected.keys():
        return math.inf, math.inf
    apart = own = other = 0.0
    for name, value in actual.items():
        mine, theirs = value.double(), expected[name].to(value.device).double()
        apart += float((mine - theirs).square().sum())
        own += float(mine.square().sum())
        other += float(theirs.square().sum())
    if not math.isfinite(apart + own + other) or not other:
        return (math.inf if apart else of_zeros), math.inf
    return math.sqrt(apart / other), math.sqrt(own / other)
