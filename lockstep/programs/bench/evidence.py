"""What a side computed, and how far that is from what another did. A faster wrong answer is worth nothing."""

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


def distance(found: Named, wanted: Named, of_zeros: float = math.inf) -> tuple[float, float]:
    """‖found − wanted‖ / ‖wanted‖ and ‖found‖ / ‖wanted‖ over all parameters, added up in float64.

    Infinite where a parameter is missing or a number not finite. `of_zeros` is the first where there are only zeros.
    """
    if found.keys() != wanted.keys():
        return math.inf, math.inf
    apart = own = other = 0.0
    for name, value in found.items():
        mine, theirs = value.double(), wanted[name].to(value.device).double()
        apart += float((mine - theirs).square().sum())
        own += float(mine.square().sum())
        other += float(theirs.square().sum())
    if not math.isfinite(apart + own + other) or not other:
        return (math.inf if apart else of_zeros), math.inf
    return math.sqrt(apart / other), math.sqrt(own / other)
