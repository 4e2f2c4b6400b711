"""Draws an all-reduce report: time over size, both logarithmic, a line for each side and number of workers. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.programs import svg
from lockstep.programs.bench.allreduce.plan import FLOOR, GLOO, LOCKSTEP
from lockstep.programs.bench.allreduce.sizes import named

WIDTH, HEIGHT = 900, 480
LEFT, RIGHT, TOP, BOTTOM = 84, 640, 76, 400
LEGEND, LEGEND_STEP = RIGHT + 24, 22
INK, PALE, GRID = "#333333", "#666666", "#e4e4e4"

COLOURS = {LOCKSTEP: "#1f6fb2", GLOO: "#d9822b", FLOOR: "#8a8a8a"}
LABELS = {LOCKSTEP: "lockstep", GLOO: "Gloo", FLOOR: "copy (floor)"}
DASHES = (None, "7 4", "2 4", "10 3 2 3")  # one for each number of workers, from the first on; the last for all others


@dataclass(frozen=True)
class TimeCurve:
    """One side on one number of workers: (bytes, ms), by bytes."""

    side: str
    workers: int
    points: tuple[tuple[int, float], ...]
    dashes: str | None

    @property
    def style(self) -> dict[str, svg.Attribute]:
        return {"stroke": COLOURS[self.side], "stroke_width": 2, "stroke_dasharray": self.dashes}


@dataclass(frozen=True)
class LogAxis:
    """Maps values from `low` to `high` onto pixels from `begin` to `end`, equal factors to equal distances."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        return self.begin + math.log(value / self.low) / math.log(self.high / self.low) * (self.end - self.begin)


def draw(report: dict[str, Any]) -> str:
    curves, machine = curves_of(report["rows"]), report["machine"]
    across, up = _axes(curves)
    subtitle = f"{machine['cores']} cores, {machine['cpu']}, torch {machine['torch']}; medians of the slowest worker"
    title = f"All-reduce of float32 in place: lockstep ({report['algorithm']}), Gloo, and a copy"
    shapes = [
        svg.text(LEFT, 30, title, font_size=17, font_weight="bold", fill=INK),
        svg.text(LEFT, 52, subtitle, font_size=13, fill=PALE),
        *_sizes(across, [size for curve in curves for size, _ in curve.points]),
        *_decades(up),
        *(shape for curve in curves for shape in _curve(curve, across, up)),
        *_legend(curves),
    ]
    return svg.document(WIDTH, max(HEIGHT, TOP + LEGEND_STEP * (len(curves) + 1)), shapes, title)


def curves_of(rows: Sequence[dict[str, Any]]) -> list[TimeCurve]:
    """The report's rows as curves, the sides of one number of workers together."""
    found = []
    for place, count in enumerate(dict.fromkeys(row["workers"] for row in rows)):
        own, dashes = [row for row in rows if row["workers"] == count], DASHES[min(place, len(DASHES) - 1)]
        for side in (GLOO, LOCKSTEP, FLOOR):
            points = tuple(sorted((row["bytes"], row[f"{side}_ms"]) for row in own))
            found.append(TimeCurve(side, count, points, dashes))
    return found


def decades(low: float, high: float) -> list[float]:
    """The powers of ten that enclose the values, and all between them."""
    first = math.floor(math.log10(low))
    last = max(first + 1, math.ceil(math.log10(high)))
    return [float(f"1e{power}") for power in range(first, last + 1)]


def _axes(curves: Sequence[TimeCurve]) -> tuple[LogAxis, LogAxis]:
    """The axes that hold all points; sizes have some room on both sides, so that one alone stands in the middle."""
    sizes = [size for curve in curves for size, _ in curve.points]
    times = [ms for curve in curves for _, ms in curve.points]
    marks = decades(min(times), max(times))
    return LogAxis(min(sizes) / 2, max(sizes) * 2, LEFT, RIGHT), LogAxis(marks[0], marks[-1], BOTTOM, TOP)


def _sizes(across: LogAxis, sizes: Sequence[int]) -> Iterator[str]:
    """The axis of sizes: a mark for each; names only where there is room for them."""
    yield svg.line((LEFT, BOTTOM), (RIGHT, BOTTOM), stroke=INK)
    yield svg.text((LEFT + RIGHT) / 2, BOTTOM + 50, "size of the tensor", text_anchor="middle", font_size=13, fill=INK)
    free = float(LEFT)
    for size in sorted(set(sizes)):
        x = across.at(size)
        yield svg.line((x, BOTTOM), (x, BOTTOM + 5), stroke=INK)
        if x - 26 >= free:
            yield svg.text(x, BOTTOM + 21, named(size), text_anchor="middle", font_size=12, fill=INK)
            free = x + 26


def _decades(up: LogAxis) -> Iterator[str]:
    """The axis of times, a line across at every power of ten."""
    for value in decades(up.low, up.high):
        y = up.at(value)
        yield svg.line((LEFT, y), (RIGHT, y), stroke=GRID)
        yield svg.text(LEFT - 8, y + 4, f"{value:.5f}".rstrip("0").rstrip("."), text_anchor="end", fill=INK)
    middle = (TOP + BOTTOM) / 2
    words = "milliseconds for one all-reduce"
    turned = f"rotate(-90 22 {middle:g})"
    yield svg.text(22, middle, words, text_anchor="middle", font_size=13, fill=INK, transform=turned)


def _curve(curve: TimeCurve, across: LogAxis, up: LogAxis) -> Iterator[str]:
    points = [(across.at(size), up.at(ms)) for size, ms in curve.points]
    yield svg.polyline(points, class_="curve", **curve.style)
    for x, y in points:
        yield svg.circle(x, y, 3, fill=COLOURS[curve.side])


def _legend(curves: Sequence[TimeCurve]) -> Iterator[str]:
    for place, curve in enumerate(curves):
        y = TOP + 8 + LEGEND_STEP * place
        yield svg.line((LEGEND, y), (LEGEND + 34, y), **curve.style)
        words = f"{LABELS[curve.side]}, {curve.workers} workers"
        yield svg.text(LEGEND + 42, y + 4, words, class_="legend", font_size=13, fill=INK)
