"""What a check says."""

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad it is. UNKNOWN: the machine does not tell, so nothing is claimed."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One check's answer: a sentence, and where something is wrong what to type against it."""

    check: str
    level: Level
    sentence: str
    fix: str = ""


def ok(check: str, sentence: str) -> Finding:
    return Finding(check, Level.OK, sentence)


def not_known(check: str, what: str) -> Finding:
    return Finding(check, Level.UNKNOWN, f"{what} is not known here")


def warning(check: str, sentence: str, fix: str) -> Finding:
    return Finding(check, Level.WARNING, sentence, fix)


def problem(check: str, sentence: str, fix: str) -> Finding:
    return Finding(check, Level.PROBLEM, sentence, fix)
