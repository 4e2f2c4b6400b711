"""The report of an all-reduce benchmark as a table for people: a line for every row, within 100 columns."""

import math
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lockstep.programs.bench.allreduce.sizes import named
from lockstep.programs.bench.width import widen

_HEADINGS = (
    "workers",
    "size",
    "lockstep\nms",
    "\np95",
    "Gloo\nms",
    "\np95",
    "floor\nms",
    "\nGB/s",
    "Gloo ÷ lockstep\n(quartiles)",
    "lockstep\n÷ floor",
)


def show(report: dict[str, Any], console: Console) -> None:
    widen(console)
    machine = report["machine"]
    console.print(_table(report["rows"]))
    console.print(
        f"{_meaning_on_gpu() if 'gpu' in machine else _meaning(report['algorithm'])}\n"
        f"{_gpu(machine)}{machine['cores']} cores, {machine['cpu']}, torch {machine['torch']}, "
        f"{machine['threads_per_worker']} thread per worker.",
        style="dim",
        highlight=False,
    )


def _meaning(algorithm: str) -> str:
    return (
        f"All-reduce of float32 in place, algorithm {algorithm}. Milliseconds of the slowest worker:\n"
        "medians over rounds, and p95 of single operations. Gloo ÷ lockstep, made within rounds, says how\n"
        "many times faster. Floor: every worker copies as many bytes, at the same time. GB/s is lockstep's."
    )


def _meaning_on_gpu() -> str:
    return (
        "All-reduce of float32 in place on the GPU, back to back. Milliseconds of one, on the slowest worker:\n"
        "medians over blocks, and p95 of blocks. Gloo ÷ lockstep, made within rounds, says how many times\n"
        "faster. Floor: 2·W·P bytes at the speed of a copy of 1 GiB. GB/s is lockstep's."
    )


def _gpu(machine: dict[str, Any]) -> str:
    return f"{machine['gpu']}, CUDA {machine['cuda']},\n" if "gpu" in machine else ""


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    times = ("lockstep_ms", "lockstep_p95_ms", "gloo_ms", "gloo_p95_ms", "floor_ms")
    low, high = short(row["ratio_to_gloo_low"]), short(row["ratio_to_gloo_high"])
    return [
        str(row["workers"]),
        named(row["bytes"]),
        *(short(row[name]) for name in times),
        short(row["bandwidth_gb_per_s"]),
        f"{short(row['ratio_to_gloo'])} [dim]({low}–{high})[/dim]",
        short(row["ratio_to_floor"]),
    ]


def short(value: float) -> str:
    """Three digits that matter, as far as five decimals hold them, and no exponent: 0.00123, 1.23, 12.3, 1,234."""
    decimals = 2 - math.floor(math.log10(value))
    return f"{value:,.{min(5, max(0, decimals))}f}"
