"""A diagnosis as lines of text."""

from collections.abc import Iterator

from lockstep.programs.doctor.amounts import count
from lockstep.programs.doctor.diagnosis import Diagnosis
from lockstep.programs.doctor.finding import Finding, Level

MARKS = {Level.OK: "✓", Level.UNKNOWN: "?", Level.WARNING: "!", Level.PROBLEM: "✗"}


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """One line for each finding, the fix below it where there is one, and what it comes to."""
    width = max(len(finding.check) for finding in diagnosis.findings)
    yield f"lockstep {diagnosis.lockstep} · {count(diagnosis.num_workers, 'worker')}"
    for finding in diagnosis.findings:
        yield from _told(finding, width)
    yield _summary(diagnosis)


def _told(finding: Finding, width: int) -> Iterator[str]:
    yield f"{MARKS[finding.level]} {finding.check:{width}}  {finding.sentence}"
    if finding.fix:
        yield f"  {'':{width}}  → {finding.fix}"


def _summary(diagnosis: Diagnosis) -> str:
    problems, warnings = diagnosis.count(Level.PROBLEM), diagnosis.count(Level.WARNING)
    if problems:
        return f"{count(problems, 'problem')}, {count(warnings, 'warning')}: a run may not work here"
    return f"No problem, {count(warnings, 'warning')}."
