"""What `lockstep verify` found, on the terminal: a table for people or JSON for programs, and the exit code."""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.programs.verification.faults import FaultResult
from lockstep.programs.verification.runs import CannotVerify, Request
from lockstep.programs.verification.verify import VerifyReport, verify
from lockstep.verify.evidence import is_equal

SHOWN = 5
DIGEST_CHARACTERS = 16


def present(request: Request, in_json: bool) -> int:
    """Verifies and prints: the report to stdout, all else to stderr. Returns the exit code: 0 only if equal."""
    progress = Console(stderr=True, highlight=False)

    @contextmanager
    def running(label: str) -> Iterator[None]:
        """A moving line on a terminal while the run goes, and a lasting one afterwards."""
        began_s = time.monotonic()
        with progress.status(f"running with {label} ..."):
            yield
        progress.print(f"ran with {label}: {time.monotonic() - began_s:.1f} s")

    try:
        report = verify(request, running)
    except CannotVerify as failed:
        if in_json:
            cause = {"cause": failed.cause} if failed.cause else {}
            print(json.dumps({"equal": False, "digests": {}, "lanes": request.lanes, "failure": str(failed), **cause}))
        print(failed, file=sys.stderr)
        return failed.exit_code
    if in_json:
        print(json.dumps(as_json(report)))
    else:
        show(report, Console(highlight=False))
    return 0 if report.equal else 1


# -- as JSON ------------------------------------------------------------------------------------------------


def as_json(report: VerifyReport) -> dict[str, Any]:
    """The whole report. Distances that are no numbers (NaN, infinite) are null: JSON has none such."""
    request, difference, likely = report.request, report.difference, report.likely_cause
    entries: dict[str, Any] = {
        "equal": report.equal,
        "digests": {str(number): report.runs[str(number)].digest for number in request.counts},
        "interleaved": {name: run.digest for name, run in report.runs.items() if not name.isdigit()},
        "steps": report.reference.num_steps,
        "lanes": request.lanes,
        "distance_to_one_lane": {n: d if math.isfinite(d) else None for n, d in report.distance.items()},
    }
    if report.reference.compiled:
        entries["compiled"] = list(report.reference.compiled)
    if report.summed:
        entries["distance_explanation"] = report.summed
    if difference is not None and likely is not None:
        entries |= {"first_step": difference.step, "first_parameter": next(iter(difference.tensors), None)}
        entries |= {"cause": str(likely.cause), "explanation": likely.explanation}
    if request.faults:
        entries["faults"] = [
            {"kind": str(fault.kind), "equal": fault.equal, "cause": fault.cause, "first_step": fault.first_step}
            | ({"explanation": fault.explanation} if fault.explanation else {})
            for fault in report.faults
        ]
    if request.faults and report.untested:
        entries["faults_untested"] = report.untested
    return entries


# -- for people ---------------------------------------------------------------------------------------------


def show(report: VerifyReport, console: Console) -> None:
    """Prints the table, the likely cause of a difference, and the distance to one lane."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run")
    table.add_column("steps", justify="right")
    table.add_column("final digest")
    table.add_column("every step")
    for run in report.runs.values():
        equal = is_equal(run, report.reference)
        result = Text("equal", "green") if equal else Text("different", "red")
        table.add_row(run.label, str(run.num_steps), run.digest[:DIGEST_CHARACTERS], result)
    for fault in report.faults:
        steps = "" if fault.num_steps is None else str(fault.num_steps)
        result = Text("different" if fault.digest else "failed", "red")
        if fault.equal:
            result = Text("equal, see below" if fault.cause else "equal", "green")
        table.add_row(fault.label, steps, fault.digest[:DIGEST_CHARACTERS], result)
    console.print(table)
    compiled = [Text(f"compiled: {text}") for text in report.reference.compiled]  # what the compiler has baked in
    for line in [*_calm_lines(report), *compiled, *_fault_lines(report), *_distance_lines(report)]:
        console.print(line, soft_wrap=True)


def _calm_lines(report: VerifyReport) -> list[Text]:
    difference, likely = report.difference, report.likely_cause
    if difference is None or likely is None:
        runs = "the run" if len(report.runs) == 1 else f"all {len(report.runs)} runs"
        text = (
            f"✓ the same bits after each of {report.reference.num_steps} steps: parameters, buffers and "
            f"optimizer state, on all workers of {runs} ({report.request.lanes} lanes)."
        )
        return [Text(text, "green")]
    when = f"after {difference.step} step{'s' * (difference.step != 1)}" if difference.step else "before the first step"
    where = f" in {difference.tensors[0]}," if difference.tensors else ""
    return [
        Text(
            f"✗ not the same bits: first difference {when},{where} between {difference.left} and {difference.right}",
            "red",
        ),
        Text(f"  likely cause: {likely.cause}"),
        Text(f"  {likely.explanation}"),
        _logs(report),
    ]


def _fault_lines(report: VerifyReport) -> list[Text]:
    if report.untested:
        return [Text(f"! faults were not tested: {report.untested}.", "yellow")]
    lines = [line for fault in report.faults for line in _lines_of(fault)]
    if not all(fault.equal for fault in report.faults):
        return [*lines, _logs(report)]
    fine = Text("✓ and also when workers are lost, and when the run is stopped and resumed.", "green")
    return [fine, *lines] if report.faults else lines


def _lines_of(fault: FaultResult) -> list[Text]:
    if not fault.cause:
        return []
    if fault.equal:
        return [Text(f"  {fault.label}: equal; {fault.cause}")]
    if not fault.digest:
        places = [line for line in fault.explanation.splitlines() if line.startswith("    ")]
        return [Text(f"✗ {fault.label}: failed", "red"), Text(f"  {fault.cause}"), *map(Text, places)]
    when = f"first difference after {fault.first_step} steps"
    lines = [f"  likely cause: {fault.cause}", f"  {fault.explanation}"]
    return [Text(f"✗ {fault.label}: not the same bits, {when}", "red"), *map(Text, lines)]


def _logs(report: VerifyReport) -> Text:
    return Text(f"  Traces and logs: {report.request.folder}")


def _distance_lines(report: VerifyReport) -> list[Text]:
    if not report.distance:
        return []
    farthest = sorted(report.distance.items(), key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])
    left_out = len(farthest) - SHOWN
    rounding = (
        "Rounding is expected. Dropout and BatchNorm legitimately differ here: they work on the samples "
        "and random numbers of a lane, and here one lane is the whole batch."
    )
    return [
        Text("\nRelative distance to one lane on one worker, which is plain PyTorch on the whole batch:"),
        *(Text(f"  {distance:9.2g}  {name}") for name, distance in farthest[:SHOWN]),
        *([Text(f"             and {left_out} more, all nearer")] if left_out > 0 else []),
        Text(f"  {report.summed or rounding}"),
    ]
