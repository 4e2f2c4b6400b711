"""Prepares, compares and times the children, one at a time. Without torch. docs/bench.md says what must agree."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.programs.bench.gpu import plan as gpu
from lockstep.programs.bench.gpu.children import SideProcess, Words, start_sides
from lockstep.programs.bench.gpu.plan import GpuOutcome, GpuStepPlan
from lockstep.programs.bench.launch import result_folder
from lockstep.programs.bench.rounds import Follow, RoundsDone

Take = Callable[[dict[str, Any]], None]  # takes the row of a plan as soon as it is measured


def bench_gpu_steps(
    plans: Sequence[GpuStepPlan], follow: Follow, take: Take, variables: Mapping[str, str]
) -> dict[str, Any]:
    """Measures every plan, one after the other; returns the report. `variables` are for every process.

    After Ctrl-C the report has what was measured until then, and is marked as stopped.
    """
    rows, machine, stopped = list[dict[str, Any]](), dict[str, Any](), False
    try:
        for plan in plans:
            outcome = measure(plan, follow, variables)
            machine, stopped = outcome.machine or machine, outcome.stopped
            rows.append(gpu.make_row(plan, outcome))
            take(rows[-1])
            if stopped:
                break
    except KeyboardInterrupt:
        stopped = True
    return gpu.make_report(rows, machine, mps=bool(variables), stopped=stopped)


def measure(plan: GpuStepPlan, follow: Follow, variables: Mapping[str, str]) -> GpuOutcome:
    """Measures the sides of one plan; none of their processes is left."""
    follow(RoundsDone(plan.title, 0, plan.rounds, "starting its processes"))
    with result_folder() as folder, start_sides(plan, folder, variables) as children:
        return SideTurns(plan, children, follow).taken()


class SideTurns:
    """Measures the sides whose children have connected. A side that fails or disagrees is left out."""

    def __init__(self, plan: GpuStepPlan, children: Sequence[SideProcess], follow: Follow) -> None:
        self._plan, self._children, self._follow = plan, children, follow
        self._outcome = GpuOutcome()

    def taken(self) -> GpuOutcome:
        outcome = self._outcome
        self._doing("making models and optimizers")  # all at once
        for child in self._children:
            child.send(word="open")
        for child in self._children:
            if answers := child.answers():
                outcome.coarse = answers[0]["coarse"]
        self._prepare()
        self._agree()
        self._doing("")
        self._take_rounds()
        for child in self._children:
            outcome.remarks[child.name] = child.remarks()
            if child.failure is not None:
                outcome.reasons[child.name] = f"failed: {child.failure}"
                outcome.seconds.pop(child.name, None)
        return outcome

    @property
    def _left(self) -> list[SideProcess]:
        return [child for child in self._children if child.failure is None and child.name not in self._outcome.reasons]

    def _doing(self, what: str) -> None:
        self._follow(RoundsDone(self._plan.title, 0, self._plan.rounds, what))

    def _prepare(self) -> None:
        """Every child warms up, one after the other because of the GPU's memory. Those that compile do that first and
        meanwhile: it is a minute's work of the CPU."""
        slow = [child for child in self._children if gpu.does(child.name, "compile")]
        for child in slow:
            child.send(word="prepare")
        for child in [*(child for child in self._children if child not in slow), *slow]:
            self._doing(f"warming up {child.name}")
            answers = child.answers() if child in slow else child.ask(word="prepare")
            if answers:
                self._outcome.parameters, self._outcome.machine = answers[0]["parameters"], answers[0]["machine"]

    def _agree(self) -> None:
        """Leaves out every side that does not compute what the reference does, with the reason."""
        self._doing("computing the reference")
        self._choose_reference()
        for child in self._left:
            if child.name not in self._outcome.evidence:
                self._doing(f"comparing {child.name} with it")
                if answers := child.ask(word="compare"):
                    self._judge(child.name, answers)
        digests = {child.name: self._outcome.evidence[child.name]["digest"] for child in self._left}
        odd = objections_of_bits({name: digest for name, digest in digests.items() if digest is not None})
        self._outcome.reasons.update({name: f"refused: {sentence}" for name, sentence in odd.items()})

    def _choose_reference(self) -> None:
        """The best reference that is there writes its evidence."""
        while left := self._left:
            name = gpu.reference_among([child.name for child in left])
            answers = next(child for child in left if child.name == name).ask(word="write")
            if answers:
                self._outcome.reference = name
                self._judge(name, answers)
                return

    def _judge(self, name: str, answers: Sequence[Words]) -> None:
        outcome = self._outcome
        outcome.evidence[name] = answers[0]
        why = objection(name, answers[0], str(outcome.reference), outcome.coarse)
        if why := why or objection_of_replicas(name, answers):
            outcome.reasons[name] = f"refused: {why}"

    def _take_rounds(self) -> None:
        """Ctrl-C ends the rounds; it is raised again only if there is nothing to report yet."""
        outcome = self._outcome
        for number in range(self._plan.rounds):
            try:
                self._round(number)
                self._follow(RoundsDone(self._plan.title, number + 1, self._plan.rounds))
            except KeyboardInterrupt:
                whole = min(map(len, outcome.seconds.values()), default=0)
                if whole == 0:
                    raise
                outcome.seconds = {name: seconds[:whole] for name, seconds in outcome.seconds.items()}
                outcome.stopped = True
                return

    def _round(self, number: int) -> None:
        by_name = {child.name: child for child in self._left}
        for name in gpu.drawn_order(number, list(by_name)):
            if answers := by_name[name].ask(word="block", steps=self._plan.steps):
                self._outcome.seconds.setdefault(name, []).append(answers[0]["seconds"] / self._plan.steps)
                peaks = self._outcome.peaks.setdefault(name, {})  # the most of any block, of all members together
                for kind in ("reserved_bytes", "allocated_bytes", "host_bytes"):
                    now = [answer[kind] for answer in answers]
                    peaks[kind] = None if None in now else max(sum(now), peaks.get(kind) or 0)


# -- agreement --------------------------------------------------------------------------------------------------


IN_FLOAT32 = {"gradients": 1e-2, "movement": 5e-2}
IN_BFLOAT16 = {"gradients": 0.25, "movement": 0.6}
OF_LENGTH = 0.1
"""How far two sides may be apart after three steps: AdamW's mean of the gradients, the parameters, and their way."""

EQUAL_BITS = (
    (gpu.CAPTURED_COMPILED, gpu.LOCKSTEP_COMPILED),
    *((name, gpu.LOCKSTEP) for name in (gpu.CAPTURED, *gpu.SHARDED)),
)
"""Sides that must hold equal bits: a graph runs the kernels that it was captured from, a divided update the same."""


def objection(side: str, distances: Mapping[str, float], reference: str, coarse: bool) -> str | None:
    """Why a side is not timed, or None if it agrees with the reference; `coarse`: the model computes in bfloat16."""
    who, length = f"{side} disagrees with {reference} after three steps", distances["length"]
    most = IN_BFLOAT16 if coarse else IN_FLOAT32
    for kind, what, of in (("gradients", "gradients", "size"), ("movement", "parameters", "way")):
        if not distances[kind] <= most[kind]:
            return f"{who}: its {what} are off by {distances[kind]:.1e} of their {of}, more than {most[kind]:g}"
    if not abs(length - 1) <= OF_LENGTH:
        return f"{who}: its parameters went {length:.3f} times as far, off by more than {OF_LENGTH:g}"
    return None


def objection_of_replicas(side: str, answers: Sequence[Words]) -> str | None:
    """Whether the workers of one side hold different bits after three steps."""
    odd = [rank for rank, answer in enumerate(answers) if answer["digest"] != answers[0]["digest"]]
    if odd:
        return f"{side} is not in agreement with itself: workers 0 and {odd[0]} hold other bits after three steps"
    return None


def objections_of_bits(digests: Mapping[str, str]) -> dict[str, str]:
    """Those of lockstep's other exact sides that hold other bits than lockstep, each with a sentence."""
    return {
        side: f"{side} disagrees with {base}: both are exact, but after three steps their bits are not equal"
        for side, base in EQUAL_BITS
        if {side, base} <= digests.keys() and digests[side] != digests[base]
    }
