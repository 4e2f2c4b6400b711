"""The result of one run of the demo, read from its worker's output, and the comparison of several. Pure."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.launch.supervision.messages import count


@dataclass
class DemoResult:
    """One run. `seconds` is all of it.

    The loss of an unreported step is NaN: a worker may be killed after a step and before its report.
    `lost_steps` counts the steps that were trained again after a later one had been reported.
    """

    num_workers: int
    tokens_per_step: int
    seconds: float = 0.0
    about: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    first_step_s: float = 0.0
    last_step_s: float = 0.0
    unreported: set[int] = field(default_factory=set)
    lost_steps: int = 0

    @property
    def complete(self) -> bool:
        return bool(self.end)

    @property
    def tokens_per_s(self) -> float:
        """Tokens learned each second of training; 0 while there are not two steps to measure between."""
        training_s = self.last_step_s - self.first_step_s
        return self.tokens_per_step * (len(self.losses) - 1) / training_s if training_s > 0 else 0.0

    @property
    def digest(self) -> str:
        return str(self.end["digest"])

    @property
    def held_out_loss(self) -> float:
        return float(self.end["held_out_loss"])

    @property
    def written(self) -> str:
        return str(self.end["written"])


class Reader:
    """Takes worker 0's output as it comes and fills in `result`; lines that are no reports go to `other`."""

    def __init__(
        self,
        result: DemoResult,
        clock: Callable[[], float],
        stepped: Callable[[DemoResult], None],
        other: Callable[[str], None],
    ) -> None:
        self._result, self._clock = result, clock
        self._stepped, self._other = stepped, other
        self._begun = b""

    def __call__(self, output: bytes) -> None:
        *lines, self._begun = (self._begun + output).split(b"\n")
        for line in lines:
            self._read(line.decode(errors="replace"))

    def _read(self, line: str) -> None:
        try:
            facts = json.loads(line)
        except ValueError:
            facts = None
        match facts:
            case {"step": int(step), "loss": float(loss)}:
                self._note_step(step, loss)
            case {"about": dict(about)}:
                self._result.about = about
            case {"end": dict(end)}:
                self._result.end = end
            case _:
                self._other(line)

    def _note_step(self, step: int, loss: float) -> None:
        result = self._result
        result.last_step_s = self._clock()
        if not result.losses:
            result.first_step_s = result.last_step_s
        result.lost_steps += step < len(result.losses)
        for unreported in range(len(result.losses) + 1, step + 1):
            result.unreported.add(unreported)
            result.losses.append(math.nan)
        result.unreported.discard(step)
        result.losses[step - 1] = loss
        self._stepped(result)


@dataclass(frozen=True)
class DemoVerdict:
    """Whether all runs trained the same model, and the sentence about it."""

    equal: bool
    sentence: str


def judge(results: Sequence[DemoResult]) -> DemoVerdict:
    """Compares every run with the first one: each step's loss, and the digest of all that was trained."""
    first = results[0]
    for other in results[1:]:
        difference = _difference(first, other)
        if difference:
            return DemoVerdict(
                False,
                f"On {count(other.num_workers, 'worker')} another model was trained than on {first.num_workers}: "
                f"{difference}. This breaks lockstep's promise: please report it, with the report's folder.",
            )
    if len(results) == 1:
        return DemoVerdict(True, "One run alone has nothing to be compared with: give two numbers of workers.")
    counts = listed([str(result.num_workers) for result in results])
    return DemoVerdict(
        True,
        f"On {counts} workers the same model was trained, bit for bit: every loss, every parameter and the "
        "optimizer's state are equal.",
    )


def judge_disturbed(undisturbed: DemoResult, disturbed: DemoResult, num_kills: int) -> DemoVerdict:
    """Whether a run whose workers were killed trained the model of the calm one. Without kills it proves nothing."""
    if num_kills == 0:
        return DemoVerdict(False, "Nobody was killed before the end, so nothing was shown: give more --steps.")
    lost = f"{count(num_kills, 'worker')} {'was' if num_kills == 1 else 'were'} killed"
    difference = _difference(undisturbed, disturbed)
    if difference:
        return DemoVerdict(
            False,
            f"{lost}, and another model was trained than in peace: {difference}. This breaks lockstep's promise: "
            "please report it, with the report's folder.",
        )
    return DemoVerdict(True, f"{lost}, and the same model was trained as in peace, bit for bit.")


def listed(words: Sequence[str]) -> str:
    """`1, 2 and 3`"""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _difference(one: DemoResult, other: DemoResult) -> str | None:
    if len(one.losses) != len(other.losses):
        return f"one made {len(one.losses)} steps, the other {len(other.losses)}"
    unreported = one.unreported | other.unreported
    for step, (mine, theirs) in enumerate(zip(one.losses, other.losses, strict=True), start=1):
        if step not in unreported and repr(mine) != repr(theirs):  # as text, because NaN is not equal to itself
            return f"their losses differ from step {step} on, {mine!r} and {theirs!r}"
    if one.digest != other.digest:
        return f"their digests are {one.digest[:16]} and {other.digest[:16]}"
    if repr(one.end) != repr(other.end):
        return "their losses on held-out text or the text they write differ"
    return None
