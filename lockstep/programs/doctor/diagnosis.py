"""The results of the checks on one machine: as values, as lines of text, as JSON; and numbers as people read them."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from lockstep.launch.supervision.messages import count

MiB = 1024**2
GiB = 1024**3


class Level(StrEnum):
    """How bad it is. UNKNOWN: it could not be found out on this machine."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    PROBLEM = "problem"


MARKS = {Level.OK: "✓", Level.UNKNOWN: "?", Level.WARNING: "!", Level.PROBLEM: "✗"}


@dataclass(frozen=True)
class CheckResult:
    """One check's answer: a sentence, and where something is wrong what to type against it."""

    level: Level
    sentence: str
    fix: str = ""


def ok(sentence: str) -> CheckResult:
    return CheckResult(Level.OK, sentence)


def not_known(what: str) -> CheckResult:
    return CheckResult(Level.UNKNOWN, f"{what} is not known here")


def warning(sentence: str, fix: str) -> CheckResult:
    return CheckResult(Level.WARNING, sentence, fix)


def problem(sentence: str, fix: str) -> CheckResult:
    return CheckResult(Level.PROBLEM, sentence, fix)


@dataclass(frozen=True)
class Diagnosis:
    num_workers: int
    lockstep: str
    results: Mapping[str, CheckResult]

    def with_results(self, more: Mapping[str, CheckResult]) -> "Diagnosis":
        """The same with further checks behind the others."""
        return replace(self, results={**self.results, **more})

    def number_of(self, level: Level) -> int:
        return sum(result.level is level for result in self.results.values())

    @property
    def exit_code(self) -> int:
        """3, the environment, where something stops a run; 0 where at most something hinders it."""
        return 3 if self.number_of(Level.PROBLEM) else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "lockstep": self.lockstep,
            "workers": self.num_workers,
            "problems": self.number_of(Level.PROBLEM),
            "warnings": self.number_of(Level.WARNING),
            "findings": [{"check": check, **asdict(result)} for check, result in self.results.items()],
        }

    def lines(self) -> Iterator[str]:
        """One line for each check, the fix below it where there is one, and the summary."""
        width = max(map(len, self.results))
        yield f"lockstep {self.lockstep} · {count(self.num_workers, 'worker')}"
        for check, result in self.results.items():
            yield f"{MARKS[result.level]} {check:{width}}  {result.sentence}"
            if result.fix:
                yield f"  {'':{width}}  → {result.fix}"
        problems, warnings = self.number_of(Level.PROBLEM), count(self.number_of(Level.WARNING), "warning")
        yield (
            f"{count(problems, 'problem')}, {warnings}: a run may not work here"
            if problems
            else f"No problem, {warnings}."
        )


def size(num_bytes: float) -> str:
    """3.2 GiB, 64 MiB."""
    return f"{num_bytes / GiB:.1f} GiB" if num_bytes >= GiB else f"{num_bytes / MiB:.0f} MiB"


def plain(number: float) -> str:
    """2, 1.5."""
    return str(int(number)) if number == int(number) else f"{number:.2g}"
