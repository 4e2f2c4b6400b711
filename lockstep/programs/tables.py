"""Tables on the terminal; whole also in a file or a pipe. Without torch."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100
OF_TEXT = ("", "model", "side", "MiB")  # the headings of columns that hold text; all others hold numbers

Columns = Sequence[tuple[str, Callable[[Any], str]]]  # a heading, and how the cell below it is made of a row


def show_table(columns: Columns, rows: Iterable[Any], console: "Console") -> None:
    """A file or a pipe gets whole tables: rich takes it for a narrow terminal."""
    from rich import box  # takes longer to import than help may
    from rich.table import Table

    if not console.is_terminal:
        console.width = WIDTH
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for heading, _ in columns:
        table.add_column(heading, justify="left" if heading in OF_TEXT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(make_cell(row) for _, make_cell in columns))
    console.print(table)


def show_notes(text: str, console: "Console") -> None:
    console.print(text, style="dim", highlight=False, soft_wrap=True)
