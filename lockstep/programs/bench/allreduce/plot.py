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

SIDES = {GLOO: ("Gloo", "#d9822b"), LOCKSTEP: ("lockstep", "#1f6fb2"), FLOOR: ("copy (floor)", "#8a8a8a")}
DASHES = (None, "7 4", "2 4", "10 3 2 3")  # one for each number of workers, from the first on; the last for all others


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
    rows, machine = sorted(report["rows"], key=lambda row: row["bytes"]), report["machine"]
    sizes, times = [row["bytes"] for row in rows], [row[f"{side}_ms"] for row in rows for side in SIDES]
    marks = decades(min(times), max(times))
    # Sizes have some room on both sides, so that one alone stands in the middle.
    across, up = LogAxis(sizes[0] / 2, sizes[-1] * 2, LEFT, RIGHT), LogAxis(marks[0], marks[-1], BOTTOM, TOP)
    subtitle = f"{machine['cores']} cores, {machine['cpu']}, torch {machine['torch']}; medians of the slowest worker"
    title = f"All-reduce of float32 in place: lockstep ({report['algorithm']}), Gloo, and a copy"
    shapes = [
        svg.text(LEFT, 30, title, font_size=17, font_weight="bold", fill=INK),
        svg.text(LEFT, 52, subtitle, font_size=13, fill=PALE),
        *_axis_of_sizes(across, sizes),
        *_axis_of_times(up, marks),
    ]
    counts, y = list(dict.fromkeys(row["workers"] for row in report["rows"])), TOP + 8
    for place, count in enumerate(counts):
        for side, (label, colour) in SIDES.items():
            dashes = DASHES[min(place, len(DASHES) - 1)]
            style: dict[str, svg.Attribute] = {"stroke": colour, "stroke_width": 2, "stroke_dasharray": dashes}
            own = [row for row in rows if row["workers"] == count]
            points = [(across.at(row["bytes"]), up.at(row[f"{side}_ms"])) for row in own]
            shapes += [
                svg.polyline(points, class_="curve", **style),
                *(svg.circle(x, y, 3, fill=colour) for x, y in points),
            ]
            words = f"{label}, {count} workers"
            shapes.append(svg.line((LEGEND, y), (LEGEND + 34, y), **style))
            shapes.append(svg.text(LEGEND + 42, y + 4, words, class_="legend", font_size=13, fill=INK))
            y += LEGEND_STEP
    return svg.document(WIDTH, max(HEIGHT, y + LEGEND_STEP), shapes, title)


def decades(low: float, high: float) -> list[float]:
    """The powers of ten that enclose the values, and all between them."""
    first = math.floor(math.log10(low))
    last = max(first + 1, math.ceil(math.log10(high)))
    return [float(f"1e{power}") for power in range(first, last + 1)]


def _axis_of_sizes(across: LogAxis, sizes: Sequence[int]) -> Iterator[str]:
    """A mark for each; names only where there is room for them."""
    yield svg.line((LEFT, BOTTOM), (RIGHT, BOTTOM), stroke=INK)
    yield svg.text((LEFT + RIGHT) / 2, BOTTOM + 50, "size of the tensor", text_anchor="middle", font_size=13, fill=INK)
    free = float(LEFT)
    for size in dict.fromkeys(sizes):
        x = across.at(size)
        yield svg.line((x, BOTTOM), (x, BOTTOM + 5), stroke=INK)
        if x - 26 >= free:
            yield svg.text(x, BOTTOM + 21, named(size), text_anchor="middle", fill=INK)
            free = x + 26


def _axis_of_times(up: LogAxis, marks: Sequence[float]) -> Iterator[str]:
    """A line across at every power of ten."""
    for value in marks:
        y = up.at(value)
        yield svg.line((LEFT, y), (RIGHT, y), stroke=GRID)
        yield svg.text(LEFT - 8, y + 4, f"{value:.5f}".rstrip("0").rstrip("."), text_anchor="end", fill=INK)
    middle, words = (TOP + BOTTOM) / 2, "milliseconds for one all-reduce"
    turned = f"rotate(-90 22 {middle:g})"
    yield svg.text(22, middle, words, text_anchor="middle", font_size=13, fill=INK, transform=turned)
