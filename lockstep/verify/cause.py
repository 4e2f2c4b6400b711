"""Why two runs of one script differ, judged from their traces. Without torch.

# Note [How a cause is found]
# Before the first difference all states were equal, so the step that led to it started from the same bits on both
# sides, and its lanes can be compared. The earliest thing in which a lane differs is the cause: threads, then its data,
# then what it drew, then its gradient. If no lane differs, the cause is between the lanes. A second run of the same
# number of workers distinguishes chance from dependence on the worker.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from lockstep.events import KEPT_BY_DATA, KEPT_BY_LANE
from lockstep.verify.evidence import Lane, RunTrace, TraceDifference

# Additions in another order move a gradient's norm by about a rounding; other random numbers by percents.
ROUNDING = 1e-3
SUM_TOLERANCE = 0.2
"""How far the ratio of two gradients may be from the number of lanes: dropout, and lanes of uneven size, move it."""


class DifferenceCause(StrEnum):
    """What most often makes two runs of one script differ; the last four show only after a fault."""

    THREADS = "threads"
    OPERATOR = "an operator without deterministic kernel"
    COMPILER = "what the compiler has chosen"
    RANDOM = "random numbers"
    BUFFER = "a buffer"
    RANK = "code that depends on the rank"
    KEPT = "something that a lane keeps for the next one"
    SAMPLES = "something that a data set keeps for the next sample"
    CARRIED = "state that a script carries for its samples by hand"
    UNTRACKED = "state that the run does not know"
    COUNT = "a count of the script's own"
    DATA = "data that cannot be found again"


@dataclass(frozen=True)
class LikelyCause:
    """The likely cause, and the evidence for it in a sentence or two."""

    cause: DifferenceCause
    explanation: str


@dataclass(frozen=True)
class Case:
    """A difference, and a way to repeat its left run, which is used when nothing else decides."""

    difference: TraceDifference
    run_again: Callable[[], RunTrace]

    @cached_property
    def reproducible(self) -> bool:
        """Whether the left run, repeated, had the same bits up to the difference."""
        pairs = zip(self.difference.left.run.workers, self.run_again().workers, strict=True)
        steps = range(self.difference.step + 1)
        return all(before.states.get(at) == after.states.get(at) for before, after in pairs for at in steps)

    @property
    def lanes(self) -> Iterator[tuple[int, Lane, Lane]]:
        """The lanes of the step that led to the difference, as both runs computed them."""
        left = self.difference.left.run.lanes_of(self.difference.step - 1)
        right = self.difference.right.run.lanes_of(self.difference.step - 1)
        return ((lane, left[lane], right[lane]) for lane in sorted(left.keys() & right.keys()))

    @property
    def tensor(self) -> str:
        return self.difference.tensors[0]

    @property
    def again(self) -> str:
        result = "gave the same bits again" if self.reproducible else "gave other bits"
        return f"A second run with {self.difference.left.run.label} {result}"

    def kept(self, by: str) -> list[str]:
        """The notes on what is kept that begin so."""
        difference = self.difference
        return [text for text in (*difference.left.run.kept, *difference.right.run.kept) if text.startswith(by)]

    def carried(self, lane: int, left: Lane, right: Lane) -> str:
        """Names a lane, and the workers that computed it on the two sides."""
        runs = self.difference.left.run.label, self.difference.right.run.label
        return f"lane {lane} (worker {left.worker} with {runs[0]}, worker {right.worker} with {runs[1]})"

    def by_worker_or_chance(self, story: str, if_worker: str, if_chance: str) -> LikelyCause:
        """If a second run gives the same bits, the cause depends on the worker; else it is chance."""
        if self.reproducible:
            return LikelyCause(DifferenceCause.RANK, f"{story}. {self.again}{if_worker}")
        return LikelyCause(DifferenceCause.RANDOM, f"{story}. {self.again}{if_chance}")


def judge(difference: TraceDifference, run_again: Callable[[], RunTrace]) -> LikelyCause:
    """The likely cause; `run_again` repeats the left run. See Note [How a cause is found]."""
    case = Case(difference, run_again)
    suspects = (by_threads, _data, by_chance, _gradient, _ended_early, by_buffer, _replicas, _start, _between_lanes)
    return next(cause for suspect in suspects if (cause := suspect(case)))


def by_threads(case: Case) -> LikelyCause | None:
    for lane, left, right in case.lanes:
        if left.threads != right.threads:
            return LikelyCause(
                DifferenceCause.THREADS,
                f"The two sides computed {case.carried(lane, left, right)} with {left.threads} and "
                f"{right.threads} threads, and threads change the bits of a matrix product. Let --threads "
                "set them, not the script.",
            )
    return None


def _data(case: Case) -> LikelyCause | None:
    for lane, left, right in case.lanes:
        if left.data != right.data:
            story = f"The data of {case.carried(lane, left, right)} differ"
            if kept := case.kept(KEPT_BY_DATA):
                return LikelyCause(DifferenceCause.SAMPLES, f"{story}, and a note says: {kept[0]}")
            return case.by_worker_or_chance(
                story,
                ", so what is read depends on the worker: look for run.rank, run.size or a second sharding in the "
                "data set, the sampler or the loop, and for what the data set keeps from sample to sample.",
                ", so the order or the content of the data comes from a generator lockstep does not set.",
            )
    return None


def by_chance(case: Case) -> LikelyCause | None:
    for lane, left, right in case.lanes:
        both = left.chance.keys() & right.chance.keys()
        moved = sorted(name for name in both if left.chance[name] != right.chance[name])
        if moved:
            return LikelyCause(
                DifferenceCause.RANDOM,
                f"At the end of {case.carried(lane, left, right)} {moved[0]}'s generator stands at different "
                "places, although the data are equal: the code drew more numbers on one side, or seeded it.",
            )
    return None


def _gradient(case: Case) -> LikelyCause | None:
    for lane, left, right in case.lanes:
        if name := differing_gradient(left, right):
            story = f"The gradient of {name} differs in {case.carried(lane, left, right)}"
            return _judge_gradient(case, story, _only_rounding(left, right))
    return None


def differing_gradient(left: Lane, right: Lane) -> str | None:
    """The first parameter whose gradient differs in a lane."""
    names = {**left.gradients, **right.gradients}
    return next((name for name in names if left.gradients.get(name) != right.gradients.get(name)), None)


def _judge_gradient(case: Case, story: str, only_rounding: bool) -> LikelyCause:
    warnings = case.difference.left.run.warnings or case.difference.right.run.warnings
    story += " by rounding only" if only_rounding else " by more than rounding"
    story += ", although data and generators are equal"
    if warnings and (only_rounding or not case.reproducible):
        warning = warnings[0].split(", but you set")[0].rstrip(".")
        return LikelyCause(DifferenceCause.OPERATOR, f"{story}, and torch warned: {warning}.")
    compiled = case.difference.left.run.compiled or case.difference.right.run.compiled
    if compiled and only_rounding:
        return LikelyCause(
            DifferenceCause.COMPILER,
            f"{story}. {case.again}, and part of the model is compiled ({compiled[0]}): kernels were chosen that suit "
            "one worker's sizes or its timing. Compile with dynamic=False; kernels of your own must not be tuned.",
        )
    if only_rounding and not case.reproducible:
        why = "so some operator adds in an order that varies."
        return LikelyCause(DifferenceCause.OPERATOR, f"{story}. {case.again}, {why}")
    kept = case.kept(KEPT_BY_LANE)
    if kept and not only_rounding and case.reproducible:
        return LikelyCause(DifferenceCause.KEPT, f"{story}. {case.again}, and a note says: {kept[0]}")
    return case.by_worker_or_chance(
        story,
        ", so it depends on the worker: look in the forward pass and the loss for run.rank, run.size, or a value of "
        "your own (a generator, a counter) kept from lane to lane.",
        ", so the forward pass draws from a generator that lockstep does not set, such as numpy.random.default_rng() "
        "without a seed.",
    )


def _only_rounding(left: Lane, right: Lane) -> bool:
    """Whether all gradients of a lane are as large on one side as on the other, up to rounding."""
    if left.gradients.keys() != right.gradients.keys():
        return False
    norms = ((left.gradients[name][1], right.gradients[name][1]) for name in left.gradients)
    return all(abs(ours - theirs) <= ROUNDING * max(ours, theirs) for ours, theirs in norms)


def _ended_early(case: Case) -> LikelyCause | None:
    difference = case.difference
    if difference.tensors:
        return None
    left, right = (side.run.workers[side.worker].num_steps for side in (difference.left, difference.right))
    story = f"{difference.left} made {left} steps, {difference.right} made {right}"
    return case.by_worker_or_chance(story, ". See what ends the loop.", ". See what ends the loop.")


def by_buffer(case: Case) -> LikelyCause | None:
    difference = case.difference
    state = difference.left.state(difference.step)
    if state is None or not state.buffers.issuperset(difference.tensors):
        return None
    return LikelyCause(
        DifferenceCause.BUFFER,
        f"Buffer {case.tensor} differs between {difference.left} and {difference.right}, while all parameters and "
        "gradients are equal. What lanes write to a buffer is averaged; what is written outside of run.lanes "
        "must be the same on every worker.",
    )


def _replicas(case: Case) -> LikelyCause | None:
    difference = case.difference
    if not difference.between_replicas:
        return None
    return case.by_worker_or_chance(
        f"Worker {difference.left.worker} and worker {difference.right.worker} of {difference.left.run.label} hold "
        f"other values of {case.tensor}, although all workers get the same gradient",
        ": look outside of run.lanes for what only some workers do, such as `if run.rank == 0`.",
        ": code outside of run.lanes draws from a generator lockstep does not set.",
    )


def _start(case: Case) -> LikelyCause | None:
    if case.difference.step > case.difference.left.run.workers[0].first_step:
        return None
    return case.by_worker_or_chance(
        f"{case.tensor} differs before the first step",
        ", so the model is made differently for another number of workers.",
        ", so the model is made from random numbers that lockstep has not set. Make it after lockstep.start(), or call "
        "torch.manual_seed before.",
    )


def _between_lanes(case: Case) -> LikelyCause:
    return case.by_worker_or_chance(
        f"{case.tensor} differs, although every lane had the same data and gradients",
        ", so the update depends on the workers: look at the lanes' weights, the learning rate, clipping and what else "
        "stands between the lanes and the next step.",
        ", so the update draws from a generator that lockstep does not set.",
    )


def explain_sum(lanes: RunTrace, one_lane: RunTrace) -> str:
    """The explanation if the loss is a sum over samples: then the mean over lanes makes its gradient smaller.

    The gradient of the first step is as many times larger with one lane as there are lanes. Nothing if it is not.
    """
    first = lanes.workers[0].first_step
    num_lanes = len(lanes.lanes_of(first))
    ours, theirs = (math.hypot(*run.norms.get(first, {}).values()) for run in (lanes, one_lane))
    if num_lanes < 2 or not ours or abs(theirs / ours / num_lanes - 1) > SUM_TOLERANCE:
        return ""
    return (
        f"The first gradient is {theirs / ours:.3g} times as large with one lane as with {num_lanes}: the loss is a "
        "sum over the samples of a lane, and lockstep takes the mean over lanes. Write "
        '`run.backward(loss, reduction="sum")`, or make the loss a mean.'
    )
