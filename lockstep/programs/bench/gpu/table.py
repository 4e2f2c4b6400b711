"""The report of a step benchmark on a GPU as tables for people: one for each model and number of workers."""

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.programs.bench.width import widen

_HOLDS = {True: "yes", False: "no", None: "not measured"}


def show_machine(report: dict[str, Any], console: Console) -> None:
    """What stands below all rows."""
    machine = report["machine"]
    console.print(
        "Milliseconds per step, medians over rounds (lowest–highest). Ratios, made within rounds, likewise.\n"
        "GiB: the most memory that a side's processes held. Apart: gradients, from the reference's.\n"
        f"{machine.get('gpu', 'no GPU')}, {machine.get('cores')} cores, torch {machine.get('torch')}, "
        f"CUDA {machine.get('cuda')}{', under MPS' if report['mps'] else ''}.",
        style="dim",
        highlight=False,
    )


def show_row(row: dict[str, Any], console: Console) -> None:
    """One model on one number of workers."""
    widen(console)
    workers = f"{row['workers']} worker{'' if row['workers'] == 1 else 's'}"
    console.print(
        f"{row['model']}, {(row['parameters'] or 0) / 1e6:.1f} M parameters, batch {row['batch_size']}, {workers}",
        style="bold",
        highlight=False,
    )
    console.print(_table(row))
    for side in row["sides"]:
        if side["reason"] is not None:
            console.print(f"! {side['side']} {escape(side['reason'])}", highlight=False, soft_wrap=True)
        for remark in side["remarks"]:
            console.print(f"! {side['side']}: {escape(remark)}", highlight=False, soft_wrap=True)
    for claim in row["claims"]:
        console.print(_claim(claim), highlight=False)
    console.print()


def _table(row: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for heading in ("side", "ms", "÷ plain fused", f"÷ {row['ddp']}", "GiB", "apart"):
        table.add_column(heading, justify="left" if heading == "side" else "right", no_wrap=True)
    for side in row["sides"]:
        table.add_row(*_cells(side))
    return table


def _cells(side: dict[str, Any]) -> list[str]:
    if side["reason"] is not None:
        return [side["side"], side["reason"].partition(":")[0], "", "", "", _apart(side["gradients_apart"])]
    return [
        side["side"],
        _spread(side, "ms", 2 if (side["ms"] or 0) < 100 else 1),
        _spread(side, "ratio_to_plain_fused", 3),
        _spread(side, "ratio_to_ddp", 3),
        _gib(side["peak_reserved_bytes"]),
        _apart(side["gradients_apart"]),
    ]


def _spread(side: dict[str, Any], name: str, decimals: int) -> str:
    if side[name] is None:
        return ""
    low, high = side[f"{name}_low"], side[f"{name}_high"]
    return f"{side[name]:.{decimals}f} [dim]({low:.{decimals}f}–{high:.{decimals}f})[/dim]"


def _gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**30:.1f}"


def _apart(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def _claim(claim: dict[str, Any]) -> str:
    ratio = "" if claim["ratio"] is None else f" (ratio {claim['ratio']:.3f}, at most {claim['most']:g})"
    return f"{claim['claim']}: {_HOLDS[claim['holds']]}{ratio}"
