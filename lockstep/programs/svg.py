"""A small writer of SVG: shapes as strings, put together into one document."""

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

Attribute = str | float | None
Point = tuple[float, float]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def document(width: float, height: float, shapes: Iterable[str], title: str) -> str:
    """A whole picture. Screen readers read the title."""
    size = f'width="{_number(width)}" height="{_number(height)}" viewBox="0 0 {_number(width)} {_number(height)}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONT}">',
        f"<title>{escape(title)}</title>",
        rect(0, 0, width, height, fill="white"),
        *shapes,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def element(name: str, content: str | None = None, /, **attributes: Attribute) -> str:
    """One element; `stroke_width=2` is written stroke-width="2", and None leaves the attribute out."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(_plain(value))}"
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}/>" if content is None else f"<{name}{written}>{escape(content)}</{name}>"


def rect(x: float, y: float, width: float, height: float, **style: Attribute) -> str:
    return element("rect", x=x, y=y, width=width, height=height, **style)


def circle(x: float, y: float, radius: float, **style: Attribute) -> str:
    return element("circle", cx=x, cy=y, r=radius, **style)


def line(start: Point, end: Point, **style: Attribute) -> str:
    return element("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], **style)


def polyline(points: Iterable[Point], **style: Attribute) -> str:
    """Straight lines through the points, without an area."""
    return element("polyline", points=_points(points), **({"fill": "none"} | style))


def text(x: float, y: float, words: str, **style: Attribute) -> str:
    """Words with their baseline at y; `text_anchor` is start, middle or end."""
    return element("text", words, x=x, y=y, **({"font_size": 12} | style))


def arrow_head(start: Point, end: Point, color: str, size: float = 7) -> str:
    """A head whose tip is at `end`, seen from `start`."""
    (from_x, from_y), (x, y) = start, end
    length = ((x - from_x) ** 2 + (y - from_y) ** 2) ** 0.5 or 1.0
    base_x, base_y = x - (x - from_x) * size / length, y - (y - from_y) * size / length
    side_x, side_y = (y - base_y) * 0.45, (base_x - x) * 0.45
    corners = [(x, y), (base_x + side_x, base_y + side_y), (base_x - side_x, base_y - side_y)]
    return element("polygon", points=_points(corners), fill=color)


def _points(points: Iterable[Point]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _plain(value: Attribute) -> str:
    return value if isinstance(value, str) else _number(value or 0.0)


def _number(value: float) -> str:
    """At most two decimals: more cannot be seen."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
