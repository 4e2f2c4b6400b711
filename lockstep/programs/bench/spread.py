"""How far apart times are."""

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of the values lie, between neighbours on a straight line; 1 value is enough."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
