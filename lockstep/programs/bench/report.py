"""What a report is made of: medians, ratios within a round, in which both sides met the same machine, and tables."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100  # of tables
NONE = "–"

Times = Sequence[float] | None  # one for each round, or none at all
ReportRow = dict[str, Any]
Columns = Sequence[tuple[str, Callable[[ReportRow], str]]]  # a heading, and how the cell below it is made of a row
_OF_TEXT = ("", "model", "side")  # the headings of columns that hold text; all others hold numbers


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


def show_table(columns: Columns, rows: Iterable[ReportRow], console: "Console") -> None:
    """A file or a pipe gets whole tables: rich takes it for a narrow terminal."""
    from rich import box  # takes longer to import than help may
    from rich.table import Table

    if not console.is_terminal:
        console.width = WIDTH
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for heading, _ in columns:
        table.add_column(heading, justify="left" if heading in _OF_TEXT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(make_cell(row) for _, make_cell in columns))
    console.print(table)


def show_notes(text: str, console: "Console") -> None:
    console.print(text, style="dim", highlight=False)


def machine_line(machine: Mapping[str, Any], processor: str = "cpu") -> str:
    threads = f"{machine['threads_per_worker']} thread per worker"
    return f"{machine['cores']} cores, {machine[processor]}, torch {machine['torch']}, {threads}."


def spread_cell(row: ReportRow, name: str, decimals: int, between: str = " ({})") -> str:
    """A median with its range, which `between` formats."""
    if row[name] is None:
        return ""
    middle, low, high = (f"{row[name + end]:.{decimals}f}" for end in ("", "_low", "_high"))
    return f"{middle}[dim]{between.format(f'{low}–{high}')}[/dim]"
