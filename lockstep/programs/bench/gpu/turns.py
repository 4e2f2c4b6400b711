"""Lets children prepare, agree and be timed, one at a time. Without torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.programs.bench.gpu.agreement import objection, objection_of_replicas, objections_of_bits
from lockstep.programs.bench.gpu.children import Child
from lockstep.programs.bench.gpu.plan import COMPILED, REDUCED, Plan, order, reference_among
from lockstep.programs.bench.result import Progress

SLOW_TO_PREPARE = (COMPILED, REDUCED)
"""They compile on the CPU for a minute, so they begin first, and the others prepare meanwhile."""

Told = Callable[[Progress], None]
"""Is told how far the plan is."""

Doing = Callable[[str], None]
"""Is told what is being done before the first round."""


@dataclass
class Outcome:
    """What became of the sides. A side is in `seconds`, per step and round by round, or in `reasons` why it is not.

    `stopped`: Ctrl-C came after the first round, and `seconds` has the rounds that were whole.
    """

    reference: str | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    evidence: dict[str, dict[str, Any]] = field(default_factory=dict)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    peaks: dict[str, dict[str, int | None]] = field(default_factory=dict)
    parameters: int | None = None
    coarse: bool = False
    machine: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False


def take_turns(plan: Plan, children: Sequence[Child], told: Told) -> Outcome:
    """Measures the sides whose children are there. What fails or disagrees is left out, and the others go on."""
    outcome = Outcome()

    def doing(what: str) -> None:
        told(Progress(0, plan.rounds, what))

    prepare(children, outcome, doing)
    agree(children, outcome, doing)
    told(Progress(0, plan.rounds))
    _take_rounds(plan, children, outcome, told)
    for child in children:
        outcome.remarks[child.name] = child.remarks()
        if child.failure is not None:
            outcome.reasons[child.name] = f"failed: {child.failure}"
            outcome.seconds.pop(child.name, None)
    return outcome


def prepare(children: Sequence[Child], outcome: Outcome, doing: Doing) -> None:
    """Every child that can be is warm. Those that are not slow warm up one after the other, for the GPU's memory."""
    doing("making models and optimizers")
    for child in children:
        child.tell(word="open")
    for child in children:
        answers = child.answers()
        if answers is not None:
            outcome.coarse = answers[0]["coarse"]
    slow = [child for child in children if child.name in SLOW_TO_PREPARE]
    for child in slow:
        child.tell(word="prepare")
    for child in [*(child for child in children if child not in slow), *slow]:
        doing(f"warming up {child.name}")
        answers = child.answers() if child in slow else child.ask(word="prepare")
        if answers is not None:
            outcome.parameters, outcome.machine = answers[0]["parameters"], answers[0]["machine"]


def agree(children: Sequence[Child], outcome: Outcome, doing: Doing) -> None:
    """Every side that is left computes what the reference does; the others have their reason."""
    doing("computing the reference")
    _choose_reference(children, outcome)
    for child in _left(children, outcome):
        if child.name not in outcome.evidence:
            doing(f"comparing {child.name} with it")
            answers = child.ask(word="compare")
            if answers is not None:
                _judge(child.name, answers, outcome)
    digests = {name: found["digest"] for name, found in outcome.evidence.items() if name not in outcome.reasons}
    odd = objections_of_bits({name: digest for name, digest in digests.items() if digest is not None})
    outcome.reasons.update({name: f"refused: {sentence}" for name, sentence in odd.items()})


def _choose_reference(children: Sequence[Child], outcome: Outcome) -> None:
    """The best reference that is there has written its movement down."""
    while left := _left(children, outcome):
        name = reference_among([child.name for child in left])
        answers = next(child for child in left if child.name == name).ask(word="write")
        if answers is not None:
            outcome.reference = name
            _judge(name, answers, outcome)
            return


def _judge(name: str, answers: Sequence[dict[str, Any]], outcome: Outcome) -> None:
    outcome.evidence[name] = answers[0]
    found = objection(name, answers[0], str(outcome.reference), outcome.coarse) or objection_of_replicas(name, answers)
    if found is not None:
        outcome.reasons[name] = f"refused: {found}"


def _take_rounds(plan: Plan, children: Sequence[Child], outcome: Outcome, told: Told) -> None:
    """Ctrl-C ends them; it is passed on only if there is nothing to report yet."""
    for number in range(plan.rounds):
        try:
            _round(plan, number, _left(children, outcome), outcome)
            told(Progress(number + 1, plan.rounds))
        except KeyboardInterrupt:
            whole = min(map(len, outcome.seconds.values()), default=0)
            if whole == 0:
                raise
            outcome.seconds = {name: seconds[:whole] for name, seconds in outcome.seconds.items()}
            outcome.stopped = True
            return


def _round(plan: Plan, number: int, children: Sequence[Child], outcome: Outcome) -> None:
    by_name = {child.name: child for child in children}
    for name in order(number, list(by_name)):
        answers = by_name[name].ask(word="block", steps=plan.steps)
        if answers is not None:
            outcome.seconds.setdefault(name, []).append(answers[0]["seconds"] / plan.steps)
            _note_peak(outcome, name, answers)


def _note_peak(outcome: Outcome, name: str, answers: Sequence[dict[str, Any]]) -> None:
    """The most of any block, of all members of the side together."""
    before = outcome.peaks.get(name, {})
    for kind in ("reserved_bytes", "allocated_bytes"):
        now = [answer[kind] for answer in answers]
        most = None if None in now else max(sum(now), before.get(kind) or 0)
        outcome.peaks.setdefault(name, {})[kind] = most


def _left(children: Sequence[Child], outcome: Outcome) -> list[Child]:
    return [child for child in children if child.failure is None and child.name not in outcome.reasons]
