"""How wide the tables of benchmarks may be."""

from rich.console import Console

WIDTH = 100


def widen(console: Console) -> None:
    """A file or a pipe gets whole tables: rich takes it for a narrow terminal."""
    if not console.is_terminal:
        console.width = WIDTH
