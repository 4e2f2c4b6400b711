"""The report of a step benchmark as a table for people."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lockstep.programs.bench.width import widen

_HEADINGS = (
    "model",
    "workers",
    "lockstep",
    "DDP",
    "DDP on\nlockstep",
    "plain,\n1 thread",
    "plain,\nall threads",
    "DDP ÷\nlockstep",
    "DDP ÷\nDDP on it",
    "lockstep ÷\n1 thread",
)


def show(report: dict[str, Any], console: Console) -> None:
    widen(console)
    machine = report["machine"]
    console.print(_table(report["rows"]))
    console.print(
        "Milliseconds per step, medians over rounds.\nRatios, made within rounds: median, lowest–highest.\n"
        f"{machine['cores']} cores, {machine['processor']}, torch {machine['torch']}, "
        f"{machine['threads_per_worker']} thread per worker.",
        style="dim",
        highlight=False,
    )


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    sides = ("lockstep", "ddp", "ddp_on_lockstep", "plain_one_thread", "plain_all_threads")
    return [
        row["model"],
        str(row["workers"]),
        *(f"{row[f'{side}_ms']:.1f}" for side in sides),
        _ratio(row, "speedup_over_ddp"),
        _ratio(row, "speedup_of_ddp_on_lockstep"),
        _ratio(row, "lockstep_over_plain_one_thread"),
    ]


def _ratio(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2f}\n[dim]{row[f'{name}_low']:.2f}–{row[f'{name}_high']:.2f}[/dim]"
