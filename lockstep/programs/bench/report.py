"""What a report is made of: medians, and ratios within a round, in which both sides met the same machine."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "–"

Times = Sequence[float] | None  # one for each round, or none at all
ReportRow = dict[str, Any]


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of the values lie, between neighbours on a straight line; 1 value is enough."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def times_of(rounds: Sequence[Mapping[str, float]], sides: Sequence[str]) -> ReportRow:
    """Of every side its times in ms, round by round, and their median."""
    times = {side: [each[side] for each in rounds] for side in sides}
    return {"rounds_ms": times, **{f"{side}_ms": quantile(values, 0.5) for side, values in times.items()}}


def spread(name: str, values: Times, low: float = 0.0, high: float = 1.0) -> dict[str, float | None]:
    """The median under this name, and two other quantiles, by default the lowest and highest."""
    fractions = {name: 0.5, f"{name}_low": low, f"{name}_high": high}
    return {key: quantile(values, fraction) if values else None for key, fraction in fractions.items()}


def ratios(above: Times, below: Times) -> list[float]:
    """One for each round; none if there are no times of a side."""
    return [one / other for one, other in zip(above, below, strict=True)] if above and below else []


def machine_line(machine: Mapping[str, Any], processor: str = "cpu") -> str:
    threads = f"{machine['threads_per_worker']} thread per worker"
    return f"{machine['cores']} cores, {machine[processor]}, torch {machine['torch']}, {threads}."


def spread_cell(row: ReportRow, name: str, decimals: int, between: str = " ({})") -> str:
    """A median with its range, which `between` formats."""
    if row[name] is None:
        return ""
    middle, low, high = (f"{row[name + end]:.{decimals}f}" for end in ("", "_low", "_high"))
    return f"{middle}[dim]{between.format(f'{low}–{high}')}[/dim]"
