"""The report of a recovery benchmark as a table for people: a line for every side, and what became of the claims."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lockstep.programs.bench.width import widen

_HEADINGS = (
    "",
    "next step\nmedian, s",
    "\np90",
    "\nmax",
    "all back\nmedian, s",
    "steps\nlost",
    "restart ÷ this\n(range)",
)
_NONE = "–"


def show(report: dict[str, Any], console: Console) -> None:
    widen(console)
    console.print(_table(report))
    console.print("\n".join([*map(claim_line, report["claims"]), *agreement_lines(report)]), highlight=False)
    console.print(_notes(report), style="dim", highlight=False)


def claim_line(claim: dict[str, Any]) -> str:
    holds = "holds" if claim["holds"] else "does not hold"
    median_s = f"{claim['median_s']:.2f} s"
    return f"{claim['title']}: a median of {claim['most_s']:.0f} s or less is claimed, {median_s} measured: {holds}"


def agreement_lines(report: dict[str, Any]) -> list[str]:
    """What is known of the bits at the end of the disturbed runs."""
    lines = ["lockstep: every disturbed run ended with the bits of an undisturbed one"]
    if report["baseline_bits_agree"] is not None:
        did = "did too" if report["baseline_bits_agree"] else "did not always"
        lines.append(f"torchrun: its runs {did}")
    return lines


def _table(report: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in report["rows"]:
        table.add_row(*_cells(row, report["kills"]))
    return table


def _cells(row: dict[str, Any], kills: int) -> list[str]:
    times = (row[f"next_{word}_s"] for word in ("median", "p90", "max"))
    return [row["title"], *map(_seconds, times), _whole(row, kills), str(row["steps_lost"]), _ratio(row)]


def _whole(row: dict[str, Any], kills: int) -> str:
    """The median, and of how many if some runs ended before all workers were back."""
    few = "" if row["whole_reached"] in (0, kills) else f" ({row['whole_reached']}/{kills})"
    return _seconds(row["whole_median_s"]) + few


def _ratio(row: dict[str, Any]) -> str:
    if row["restart_ratio"] is None:
        return _NONE
    low, high = row["restart_ratio_low"], row["restart_ratio_high"]
    return f"{row['restart_ratio']:.1f} [dim]({low:.1f}–{high:.1f})[/dim]"


def _seconds(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def _notes(report: dict[str, Any]) -> str:
    machine = report["machine"]
    counts = " · ".join(f"{report[name]} {name}" for name in ("workers", "lanes", "kills"))
    return (
        "Seconds from SIGKILL until the next new step was committed, and until one was by as many workers as\n"
        f"before ({_NONE}: the run ended first). Steps lost are those of all kills; they were computed again.\n"
        f"{report['model']} · {counts} of each side, in turn\n"
        f"{machine['cores']} cores, {machine['cpu']}, torch {machine['torch']}, "
        f"{machine['threads_per_worker']} thread per worker."
    )
