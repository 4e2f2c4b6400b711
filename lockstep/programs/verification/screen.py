"""A verification on the terminal: a line for each run while it goes, then the report and the exit code."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console

from lockstep.programs.verification.report import as_json, failure_as_json, show
from lockstep.programs.verification.runs import CannotVerify, Request
from lockstep.programs.verification.verify import verify


def present(request: Request, in_json: bool) -> int:
    """Verifies and prints: the report to stdout, all else to stderr. Gives the exit code: 0 only if equal."""
    progress = Console(stderr=True, highlight=False)
    try:
        report = verify(request, partial(_running, progress))
    except CannotVerify as failed:
        if in_json:
            print(json.dumps(failure_as_json(request, failed)))
        print(failed, file=sys.stderr)
        return failed.exit_code
    if in_json:
        print(json.dumps(as_json(report)))
    else:
        show(report, Console(highlight=False))
    return 0 if report.equal else 1


@contextmanager
def _running(progress: Console, label: str) -> Iterator[None]:
    """A moving line on a terminal while the run goes, and a lasting one afterwards."""
    began_s = time.monotonic()
    with progress.status(f"running with {label} ..."):
        yield
    progress.print(f"ran with {label}: {time.monotonic() - began_s:.1f} s")
