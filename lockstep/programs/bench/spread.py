"""The spread of times, and their ratios: taken within a round, where both sides met the same machine."""

import math
from collections.abc import Mapping, Sequence

Times = Sequence[float] | None  # one for each round, or none at all


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of the values lie, between neighbours on a straight line; 1 value is enough."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def by_side(rounds: Sequence[Mapping[str, float]], sides: Sequence[str]) -> dict[str, list[float]]:
    return {side: [times[side] for times in rounds] for side in sides}


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Of each side's times in ms, by the key that it has in a report."""
    return {f"{side}_ms": quantile(values, 0.5) for side, values in times.items()}


def spread(name: str, values: Times, low: float = 0.0, high: float = 1.0) -> dict[str, float | None]:
    """The median under this name, and two other quantiles, by default the lowest and highest."""
    fractions = {name: 0.5, f"{name}_low": low, f"{name}_high": high}
    return {key: quantile(values, fraction) if values else None for key, fraction in fractions.items()}


def ratios(above: Times, below: Times) -> list[float]:
    """One for each round; none if there are no times of a side."""
    return [one / other for one, other in zip(above, below, strict=True)] if above and below else []
