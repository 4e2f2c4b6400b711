"""All findings about one machine."""

from dataclasses import dataclass
from typing import Any

from lockstep.programs.doctor.checks import CHECKS
from lockstep.programs.doctor.facts import Facts
from lockstep.programs.doctor.finding import Finding, Level


@dataclass(frozen=True)
class Diagnosis:
    num_workers: int
    lockstep: str
    findings: tuple[Finding, ...]

    def count(self, level: Level) -> int:
        return sum(finding.level is level for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """3, the environment, where something stops a run; 0 where at most something hinders it."""
        return 3 if self.count(Level.PROBLEM) else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "lockstep": self.lockstep,
            "workers": self.num_workers,
            "problems": self.count(Level.PROBLEM),
            "warnings": self.count(Level.WARNING),
            "findings": [_as_json(finding) for finding in self.findings],
        }


def diagnose(facts: Facts) -> Diagnosis:
    """What every check says about the facts, in their order. Pure."""
    findings = tuple(check(facts) for check in CHECKS)
    return Diagnosis(facts.num_workers, facts.software.running, findings)


def _as_json(finding: Finding) -> dict[str, str]:
    return {
        "check": finding.check,
        "level": finding.level.value,
        "sentence": finding.sentence,
        "fix": finding.fix,
    }
