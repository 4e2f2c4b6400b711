"""Tables of benchmarks for people, within 100 columns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100
NONE = "–"

ReportRow = dict[str, Any]
Columns = Sequence[tuple[str, Callable[[ReportRow], str]]]  # a heading, and how the cell below it is made of a row
_OF_TEXT = ("", "model", "side")  # the headings of columns that hold text; all others hold numbers


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
    return (
        f"{machine['cores']} cores, {machine[processor]}, torch {machine['torch']}, "
        f"{machine['threads_per_worker']} thread per worker."
    )


def spread_cell(row: ReportRow, name: str, decimals: int, between: str = " ({})") -> str:
    """A median with its range, which `between` formats."""
    if row[name] is None:
        return ""
    middle, low, high = (f"{row[name + end]:.{decimals}f}" for end in ("", "_low", "_high"))
    return f"{middle}[dim]{between.format(f'{low}–{high}')}[/dim]"
