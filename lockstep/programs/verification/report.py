"""What `lockstep verify` found, as a table for people and as JSON for programs."""

import math
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.programs.verification.faults import FaultResult
from lockstep.programs.verification.runs import CannotVerify, Request
from lockstep.programs.verification.verify import Report
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
    summed = {"distance_explanation": report.summed} if report.summed else {}
    return plain | summed | _difference_as_json(report) | _faults_as_json(report)


def failure_as_json(request: Request, failed: CannotVerify) -> dict[str, Any]:
    """The report of a verification that could not be done."""
    cause = {"cause": failed.cause} if failed.cause else {}
    return {"equal": False, "digests": {}, "lanes": request.lanes, "failure": str(failed), **cause}


def show(report: Report, console: Console) -> None:
    """Prints the table, the verdict and the distance to one lane."""
    console.print(_runs_table(report))
    lines = _equal_lines(report) if report.difference is None else _different_lines(report)
    for line in lines + _fault_lines(report) + (_distance_lines(report) if report.distance else []):
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


def _faults_as_json(report: Report) -> dict[str, Any]:
    if not report.request.faults:
        return {}
    untested = {"faults_untested": report.untested} if report.untested else {}
    return {"faults": [_fault_as_json(fault) for fault in report.faults], **untested}


def _fault_as_json(fault: FaultResult) -> dict[str, Any]:
    plain = {"kind": str(fault.kind), "equal": fault.equal, "cause": fault.cause, "first_step": fault.first_step}
    return plain | ({"explanation": fault.explanation} if fault.explanation else {})


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
    for fault in report.faults:
        steps = "" if fault.num_steps is None else str(fault.num_steps)
        table.add_row(fault.label, steps, fault.digest[:DIGEST_CHARACTERS], _word(fault))
    return table


def _word(fault: FaultResult) -> Text:
    if fault.equal:
        return Text("equal, see below" if fault.cause else "equal", "green")
    return Text("different" if fault.digest else "failed", "red")


def _equal_lines(report: Report) -> list[Text]:
    return [
        Text(
            f"✓ the same bits after each of {report.reference.num_steps} steps: parameters, buffers and "
            f"optimizer state, on all workers of {_runs(len(report.runs))} ({report.request.lanes} lanes).",
            "green",
        )
    ]


def _runs(count: int) -> str:
    return "the run" if count == 1 else f"all {count} runs"


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
        _where(report),
    ]


def _fault_lines(report: Report) -> list[Text]:
    if report.untested:
        return [Text(f"! faults were not tested: {report.untested}.", "yellow")]
    worth = [fault for fault in report.faults if fault.cause]
    fine = [Text("✓ and also when workers are lost, and when the run is stopped and resumed.", "green")]
    all_well = fine if report.faults and all(fault.equal for fault in report.faults) else []
    told = [*all_well, *(line for fault in worth for line in _lines_of(fault))]
    return told if all(fault.equal for fault in report.faults) else [*told, _where(report)]


def _lines_of(fault: FaultResult) -> list[Text]:
    assert fault.cause is not None
    if fault.equal:
        return [Text(f"  {fault.label}: equal; {fault.cause}")]
    if not fault.digest:
        places = [line for line in fault.explanation.splitlines() if line.startswith("    ")]
        return [Text(f"✗ {fault.label}: failed", "red"), Text(f"  {fault.cause}"), *map(Text, places)]
    when = f"first difference after {fault.first_step} steps"
    lines = [f"  likely cause: {fault.cause}", f"  {fault.explanation}"]
    return [Text(f"✗ {fault.label}: not the same bits, {when}", "red"), *map(Text, lines)]


def _where(report: Report) -> Text:
    return Text(f"  Traces and logs: {report.request.folder}")


def _distance_lines(report: Report) -> list[Text]:
    farthest = sorted(report.distance.items(), key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])
    left_out = len(farthest) - SHOWN
    return [
        Text("\nRelative distance to one lane on one worker, which is plain PyTorch on the whole batch:"),
        *(Text(f"  {distance:9.2g}  {name}") for name, distance in farthest[:SHOWN]),
        *([Text(f"             and {left_out} more, all nearer")] if left_out > 0 else []),
        Text(
            f"  {report.summed}"
            if report.summed
            else "  Rounding is expected. Dropout and BatchNorm legitimately differ here: they work on the samples "
            "and random numbers of a lane, and here one lane is the whole batch."
        ),
    ]
