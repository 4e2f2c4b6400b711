"""What `lockstep verify` found, as a table for people and as JSON for programs."""

import math
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.programs.verification.verify import Report, Request
from lockstep.verify.compare import is_equal

SHOWN = 5
DIGEST_CHARACTERS = 16


def as_json(report: Report) -> dict[str, Any]:
    """The whole report. Distances that are no numbers (NaN, infinite) are null: JSON has no word for them."""
    request = report.request
    plain = {
        "equal": report.equal,
        "digests": {str(count): report.runs[str(count)].digest for count in request.counts},
        "interleaved": {name: run.digest for name, run in report.runs.items() if not name.isdigit()},
        "steps": report.reference.num_steps,
        "lanes": request.lanes,
        "distance_to_one_lane": {n: d if math.isfinite(d) else None for n, d in report.distance.items()},
    }
    return plain | _difference_as_json(report)


def failure_as_json(request: Request, text: str) -> dict[str, Any]:
    """The report of a verification that could not be done."""
    return {"equal": False, "digests": {}, "lanes": request.lanes, "failure": text}


def show(report: Report, console: Console) -> None:
    """Prints the table, the verdict and the distance to one lane."""
    console.print(_runs_table(report))
    lines = _equal_lines(report) if report.equal else _different_lines(report)
    for line in lines + (_distance_lines(report) if report.distance else []):
        console.print(line, soft_wrap=True)


def _difference_as_json(report: Report) -> dict[str, Any]:
    if report.difference is None or report.verdict is None:
        return {}
    return {
        "first_step": report.difference.step,
        "first_parameter": next(iter(report.difference.tensors), None),
        "cause": str(report.verdict.cause),
        "explanation": report.verdict.explanation,
    }


def _runs_table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run")
    table.add_column("steps", justify="right")
    table.add_column("final digest")
    table.add_column("every step")
    for run in report.runs.values():
        equal = is_equal(run, report.reference)
        word = Text("equal", "green") if equal else Text("different", "red")
        table.add_row(run.label, str(run.num_steps), run.digest[:DIGEST_CHARACTERS], word)
    return table


def _equal_lines(report: Report) -> list[Text]:
    return [
        Text(
            f"✓ the same bits after each of {report.reference.num_steps} steps: parameters, buffers and "
            f"optimizer state, on all workers of all {len(report.runs)} runs ({report.request.lanes} lanes).",
            "green",
        )
    ]


def _different_lines(report: Report) -> list[Text]:
    found, verdict = report.difference, report.verdict
    assert found is not None
    assert verdict is not None
    when = f"after {found.step} step{'s' * (found.step != 1)}" if found.step else "before the first step"
    where = f" in {found.tensors[0]}," if found.tensors else ""
    sides = f" between {found.left} and {found.right}"
    return [
        Text(f"✗ not the same bits: first difference {when},{where}{sides}", "red"),
        Text(f"  likely cause: {verdict.cause}"),
        Text(f"  {verdict.explanation}"),
        Text(f"  Traces and logs: {report.request.folder}"),
    ]


def _distance_lines(report: Report) -> list[Text]:
    farthest = sorted(report.distance.items(), key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])
    left_out = len(farthest) - SHOWN
    return [
        Text("\nRelative distance to one lane on one worker, which is plain PyTorch on the whole batch:"),
        *(Text(f"  {distance:9.2g}  {name}") for name, distance in farthest[:SHOWN]),
        *([Text(f"             and {left_out} more, all nearer")] if left_out > 0 else []),
        Text(
            "  Rounding is expected. Dropout and BatchNorm legitimately differ here: they work on the samples "
            "and random numbers of a lane, and here one lane is the whole batch."
        ),
    ]
