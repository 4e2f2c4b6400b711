"""A story as a picture: workers are columns, rounds are rows, and time runs downwards.

Every part has a colour. A cell is as strong as its part is complete, so a part can be followed by eye.
"""

import colorsys
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.launch.supervision.messages import count
from lockstep.programs import svg
from lockstep.programs.explain.story import EXAMPLE_BYTES, RoundMessage, Story, spans

INK, PALE, FRAME, BAND = "#1f2933", "#7b8794", "#c3cad3", "#f1f4f8"
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_BOTTOM = 96, 28, 92
LEAST_WIDTH = 640
ROW_HEIGHT, BOX_HEIGHT = 112, 24
FIRST_ROW = 150
MOST_COLORS = 16
MOST_LABELS = 24


@dataclass(frozen=True)
class Sheet:
    """Where everything is on the page."""

    num_workers: int
    num_parts: int
    num_rows: int

    @property
    def cell_width(self) -> float:
        for_all = min(120.0, max(36.0, 1200.0 / self.num_workers))
        return max(0.5, min(20.0, for_all / self.num_parts))

    @property
    def box_width(self) -> float:
        return max(26.0, self.cell_width * self.num_parts)

    @property
    def width(self) -> float:
        return max(LEAST_WIDTH, MARGIN_LEFT + self.column_width * self.num_workers + MARGIN_RIGHT)

    @property
    def column_width(self) -> float:
        return self.box_width + max(22.0, 70.0 - self.num_workers)

    @property
    def height(self) -> float:
        return self.top(self.num_rows - 1) + BOX_HEIGHT + MARGIN_BOTTOM

    def middle(self, rank: int) -> float:
        return MARGIN_LEFT + self.column_width * (rank + 0.5)

    def top(self, row: int) -> float:
        return FIRST_ROW + ROW_HEIGHT * row


def picture(story: Story) -> str:
    sheet = Sheet(story.schedule.num_workers, story.schedule.num_parts, len(story.scenes) + 1)
    shapes = [
        *_hosts(story, sheet),
        *_heads(story, sheet),
        *_all_messages(story, sheet),
        *_all_boxes(story, sheet),
        *_captions(story, sheet),
    ]
    return svg.document(sheet.width, sheet.height, shapes, _title(story))


def _title(story: Story) -> str:
    schedule = story.schedule
    return f"{schedule.collective.replace('_', '-')}: {story.name}, {count(schedule.num_workers, 'worker')}"


def _hosts(story: Story, sheet: Sheet) -> Iterator[str]:
    """A band behind the workers of each host."""
    for number, ranks in enumerate(story.hosts or ()):
        left = sheet.middle(ranks[0]) - sheet.column_width / 2 + 6
        width = sheet.column_width * len(ranks) - 12
        bottom = sheet.top(sheet.num_rows - 1) + BOX_HEIGHT + 12
        yield svg.rect(left, 72, width, bottom - 72, rx=10, fill=BAND)
        yield svg.text(left + 10, 89, f"host {number}", fill=PALE, font_size=11)


def _heads(story: Story, sheet: Sheet) -> Iterator[str]:
    """A circle with its rank above every column, and the thread of its time."""
    yield svg.text(24, 34, _title(story), font_size=18, font_weight="bold", fill=INK)
    yield svg.text(24, 54, story.algorithm.summary, font_size=12, fill=PALE)
    for rank in range(sheet.num_workers):
        x = sheet.middle(rank)
        yield svg.line((x, 110), (x, sheet.top(sheet.num_rows - 1)), stroke=FRAME, stroke_width=1)
        yield svg.circle(x, 110, 15, fill=INK)
        yield svg.text(x, 115, str(rank), text_anchor="middle", font_size=13, font_weight="bold", fill="white")


def _all_boxes(story: Story, sheet: Sheet) -> Iterator[str]:
    for row, held in enumerate([story.at_first, *(scene.held for scene in story.scenes)]):
        label = f"round {row}" if row else "before"
        yield svg.text(24, sheet.top(row) + 17, label, font_size=12, font_weight="bold", fill=INK)
        for rank, counts in enumerate(held):
            yield from _box(story, sheet, rank, row, counts)


def _box(story: Story, sheet: Sheet, rank: int, row: int, counts: tuple[int, ...]) -> Iterator[str]:
    """One worker after one round: a cell for every part, with the number of contributions in it if there is room."""
    cell = sheet.box_width / sheet.num_parts
    left, top = sheet.middle(rank) - sheet.box_width / 2, sheet.top(row)
    yield svg.rect(left, top, sheet.box_width, BOX_HEIGHT, fill="white", stroke="none")
    for part, held in enumerate(counts):
        x = left + cell * part
        share = held / story.whole
        strength = 0.9 if share == 1 else 0.08 + 0.42 * share if held else 0.0
        yield svg.rect(x, top, cell, BOX_HEIGHT, fill=_color(part, sheet.num_parts), fill_opacity=strength)
        if cell >= 14 and held:
            ink = "white" if share == 1 else INK
            yield svg.text(x + cell / 2, top + 16, str(held), text_anchor="middle", font_size=11, fill=ink)
    yield svg.rect(left, top, sheet.box_width, BOX_HEIGHT, rx=3, fill="none", stroke=PALE, stroke_width=1)


def _all_messages(story: Story, sheet: Sheet) -> Iterator[str]:
    for row, scene in enumerate(story.scenes):
        for message in scene.messages:
            yield from _arrow(message, sheet, row)
        if sheet.num_parts > 1 and len(scene.messages) <= MOST_LABELS:
            for message in scene.messages:
                yield from _label(message, sheet, row)


def _arrow(message: RoundMessage, sheet: Sheet, row: int) -> Iterator[str]:
    """From the sender before the round to the receiver after it; dashed if the value is copied, not added."""
    start, end = _ends(message, sheet, row)
    color = _message_color(message, sheet)
    dash = None if message.is_summand else "5 3"
    yield svg.line(start, end, stroke=color, stroke_width=1.6, stroke_dasharray=dash, stroke_opacity=0.85)
    yield svg.arrow_head(start, end, color)


def _label(message: RoundMessage, sheet: Sheet, row: int) -> Iterator[str]:
    """The parts, on a white ground, near the sender; higher on arrows to the left, so that two rarely meet."""
    (x1, y1), (x2, y2) = _ends(message, sheet, row)
    along = 0.38 if message.target > message.source else 0.2
    x, y = x1 + (x2 - x1) * along, y1 + (y2 - y1) * along
    words = "all" if len(message.parts) == sheet.num_parts else spans(message.parts)
    width = 6.2 * len(words) + 6
    yield svg.rect(x - width / 2, y - 8, width, 14, rx=3, fill="white", fill_opacity=0.92)
    color = _message_color(message, sheet)
    yield svg.text(x, y + 3, words, text_anchor="middle", font_size=10, font_weight="bold", fill=color)


def _ends(message: RoundMessage, sheet: Sheet, row: int) -> tuple[svg.Point, svg.Point]:
    """Leaves and arrives on the side of the box that faces the other worker."""
    side = sheet.box_width / 4 * (1 if message.target > message.source else -1)
    start = (sheet.middle(message.source) + side, sheet.top(row) + BOX_HEIGHT + 2)
    end = (sheet.middle(message.target) - side, sheet.top(row + 1) - 3)
    return start, end


def _message_color(message: RoundMessage, sheet: Sheet) -> str:
    return _color(message.parts[0], sheet.num_parts) if len(message.parts) == 1 else "#52606d"


def _color(part: int, num_parts: int) -> str:
    """Colours around the circle, dark enough to read; many parts share one, which could not be distinguished."""
    if num_parts > MOST_COLORS or num_parts == 1:
        return "#2563a8"
    hue = (210 / 360 + part / num_parts) % 1
    red, green, blue = (round(255 * share) for share in colorsys.hls_to_rgb(hue, 0.4, 0.62))
    return f"#{red:02x}{green:02x}{blue:02x}"  # not hsl(): several viewers do not know it


def _captions(story: Story, sheet: Sheet) -> Iterator[str]:
    bottom = sheet.top(sheet.num_rows - 1) + BOX_HEIGHT
    num_bytes = story.proof.most_bytes_sent(EXAMPLE_BYTES) / EXAMPLE_BYTES
    lines = [
        (
            INK,
            f"{count(story.proof.rounds, 'round')}; the busiest worker sends {num_bytes:.2f} MiB of a 1 MiB message.",
        ),
        (INK, f"Cost: {story.algorithm.cost}"),
        (PALE, "Cells: parts, and how many contributions each has. Solid arrows are added, dashed ones copied."),
    ]
    for number, (color, words) in enumerate(lines):
        yield svg.text(24, bottom + 34 + 19 * number, words, font_size=11, fill=color)
