"""When a checkpoint is due: every so many steps, every so many minutes, or whichever comes first."""

import re
from dataclasses import dataclass

from lockstep.errors import BadArgument
from lockstep.settings.limits import as_whole

USUAL_MINUTES = 10.0

_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_MINUTES = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1 / 60),
    **dict.fromkeys(("min", "minute", "minutes"), 1.0),
    **dict.fromkeys(("h", "hour", "hours"), 60.0),
}


@dataclass(frozen=True)
class Every:
    """How often; with both, whichever comes first. With neither it is every ten minutes."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise BadArgument(f"checkpoints come every so many whole steps, 1 or more, not every {self.steps!r}")
        number = type(self.minutes) in (int, float)
        if self.minutes is not None and not (number and 0 < self.minutes < float("inf")):
            raise BadArgument(f"checkpoints come every so many minutes, more than 0, not every {self.minutes!r}")
        if self.steps is None and self.minutes is None:
            object.__setattr__(self, "minutes", USUAL_MINUTES)


def parse_every(text: str) -> Every:
    """`100 steps`, `10 min`, or both with a comma between them."""
    found: dict[str, float] = {}
    for part in text.lower().split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise BadArgument(_unreadable(text, part))
        number, word = match.groups()
        kind, value = _valued(text, number, word)
        if kind in found:
            raise BadArgument(f"{text!r} says twice after how many {kind} a checkpoint is due: say it once")
        found[kind] = value
    steps = found.get("steps")
    return Every(None if steps is None else int(steps), found.get("minutes"))


def _valued(text: str, number: str, word: str) -> tuple[str, float]:
    if word in ("step", "steps"):
        steps = as_whole(number)
        if steps is None:
            raise BadArgument(f"{text[:60]!r}: steps are whole, and {number[:60]} is not, or is too many")
        return "steps", steps
    if word in _MINUTES:
        return "minutes", float(number) * _MINUTES[word]
    raise BadArgument(_unreadable(text, f"{number} {word}"))


def _unreadable(text: str, part: str) -> str:
    where = f"{text[:60]!r}: {part.strip()[:60]!r}" if part.strip() != text.strip() else repr(text[:60])
    return f"{where} does not say how often: write '100 steps', '10 min', or both as '100 steps, 10 min'"


@dataclass
class Schedule:
    """Counts from the last checkpoint. Steps are those of the run, seconds those of any clock."""

    every: Every
    step: int
    now_s: float

    def due(self, step: int, now_s: float) -> bool:
        """Whether a checkpoint of `step` is due. Never twice for one step."""
        by_steps = self.every.steps is not None and step >= self._next_step()
        by_time = self.every.minutes is not None and now_s - self.now_s >= self.every.minutes * 60
        return step > self.step and (by_steps or by_time)

    def done(self, step: int, now_s: float) -> None:
        """Counts from here on."""
        self.step, self.now_s = step, now_s

    def _next_step(self) -> int:
        """The next multiple, so that the steps that are saved do not depend on where a run was resumed."""
        assert self.every.steps is not None
        return (self.step // self.every.steps + 1) * self.every.steps
