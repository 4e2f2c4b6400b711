"""Draws loss curves as an SVG picture. Pure: numbers in, text out."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.programs import svg

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 64, 740, 74, 376
LETTER = 8
"""Wider than most letters of the legend."""
INK = "#333333"
MARKED: dict[str, svg.Attribute] = {"stroke": "#d33a2c", "stroke_dasharray": "3 3"}


@dataclass(frozen=True)
class LossCurve:
    """One value after each step, from step 1."""

    label: str
    values: Sequence[float]


@dataclass(frozen=True)
class Style:
    colour: str
    width: float
    dashes: str | None = None


# Note [Curves that coincide]
# Curves with equal values lie on one another. The first is drawn wide and pale, each next one narrower on top
# of it, the last ones dashed: so all of them can be seen, and that they are one line.
STYLES = (
    Style("#bcd7f2", 11),
    Style("#f0a13a", 5.5),
    Style("#1b3a5c", 1.6, "7 5"),
    Style("#8e2a6b", 1.6, "2 6"),
)


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` onto pixels from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        return round(self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin), 1)


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, about so many, a step of 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def draw(
    curves: Sequence[LossCurve], title: str, subtitle: str, value_name: str = "loss", marks: Sequence[int] = ()
) -> str:
    """A picture with axes, a legend, all curves and a line at each step of `marks`; values not finite leave a gap."""
    across, up = _axes(curves)
    shapes = [
        svg.text(LEFT, 30, title, font_size=17, font_weight="bold", fill=INK),
        svg.text(LEFT, 51, subtitle, font_size=13, fill="#666666"),
        *_grid(across, up, value_name),
        *(svg.line((x, TOP), (x, BOTTOM), class_="mark", **MARKED) for x in map(across.at, marks)),
        *(_line(curve, style_of(place), across, up) for place, curve in enumerate(curves)),
        *_legend([curve.label for curve in curves]),
    ]
    return svg.document(WIDTH, HEIGHT, shapes, title)


def style_of(place: int) -> Style:
    """See Note [Curves that coincide]."""
    return STYLES[min(place, len(STYLES) - 1)]


def _axes(curves: Sequence[LossCurve]) -> tuple[Axis, Axis]:
    last = max([2, *(len(curve.values) for curve in curves)])
    finite = [value for curve in curves for value in curve.values if math.isfinite(value)] or [0.0, 1.0]
    low, high = math.floor(min(finite)), math.ceil(max(finite))
    return Axis(0, last, LEFT, RIGHT), Axis(low, max(high, low + 1), BOTTOM, TOP)


def _grid(across: Axis, up: Axis, value_name: str) -> Iterator[str]:
    for value in ticks(up.low, up.high):
        y = up.at(value)
        yield svg.line((LEFT, y), (RIGHT, y), stroke="#e4e4e4")
        yield _text(LEFT - 8, y + 4, f"{value:g}", text_anchor="end")
    for value in ticks(across.low, across.high):
        x = across.at(value)
        yield svg.line((x, BOTTOM), (x, BOTTOM + 5), stroke=INK)
        yield _text(x, BOTTOM + 20, f"{value:g}", text_anchor="middle")
    yield svg.polyline([(LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM)], stroke=INK)
    yield _text((LEFT + RIGHT) / 2, HEIGHT - 14, "step", text_anchor="middle")
    middle = (TOP + BOTTOM) / 2
    yield _text(22, middle, value_name, text_anchor="middle", transform=f"rotate(-90 22 {middle:g})")


def _line(curve: LossCurve, style: Style, across: Axis, up: Axis) -> str:
    words, pen_down = [], False
    for step, value in enumerate(curve.values, start=1):
        if math.isfinite(value):
            words.append(f"{'L' if pen_down else 'M'}{across.at(step)} {up.at(value)}")
        pen_down = math.isfinite(value)
    return svg.element("path", d="".join(words), class_="curve", fill="none", **_stroke(style))


def _legend(labels: Sequence[str]) -> Iterator[str]:
    width = 88 + LETTER * max(map(len, labels))
    left = RIGHT - width
    yield svg.rect(left, TOP + 2, width, 24 * len(labels) + 4, fill="#ffffff")
    for place, label in enumerate(labels):
        y = TOP + 16 + 24 * place
        yield svg.line((left + 10, y), (left + 60, y), **_stroke(style_of(place)))
        yield _text(left + 70, y + 4, label, class_="legend")


def _stroke(style: Style) -> dict[str, svg.Attribute]:
    return {
        "stroke": style.colour,
        "stroke_width": style.width,
        "stroke_dasharray": style.dashes,
        "stroke_linejoin": "round",
        "stroke_linecap": "butt",
    }


def _text(x: float, y: float, words: str, **style: svg.Attribute) -> str:
    return svg.text(x, y, words, font_size=13, fill=INK, **style)
