"""Why two runs of one script differ, judged from their traces. Without torch.

# Note [How a cause is told]
# Before the first difference all states were equal, so the step that led to it started from the same bits on
# both sides, and its lanes can be laid side by side. The earliest thing in which a lane differs is the cause:
# threads, then what it was given, then what it drew, then its gradient. If no lane differs, the cause lies
# between the lanes. Whether the same number of workers gives the same bits twice tells chance from
# dependence on the worker.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from lockstep.verify.compare import Difference
from lockstep.verify.evidence import Lane, RunTrace

# Additions in another order move a gradient's norm by about a rounding; other random numbers by percents.
ROUNDING = 1e-3
SUM_TOLERANCE = 0.2
"""How far the ratio of two gradients may be from the number of lanes: dropout, and lanes of uneven size, move it."""


class Cause(StrEnum):
    """What most often makes two runs of one script differ; the last four only show when something happens to a run."""

    THREADS = "threads"
    OPERATOR = "an operator without deterministic kernel"
    RANDOM = "random numbers"
    BUFFER = "a buffer"
    RANK = "code that depends on the rank"
    CARRIED = "state that a script carries for its samples by hand"
    UNTRACKED = "state that the run does not know"
    COUNT = "a count of the script's own"
    DATA = "data that cannot be found again"


@dataclass(frozen=True)
class Verdict:
    """The likely cause, and the evidence for it in a sentence or two."""

    cause: Cause
    explanation: str


@dataclass(frozen=True)
class Case:
    """A difference, and a way to do its left run a second time, which is used when nothing else tells."""

    found: Difference
    run_again: Callable[[], RunTrace]

    @cached_property
    def reproducible(self) -> bool:
        """Whether the left run, done a second time, had the same bits up to the difference."""
        return _same_up_to(self.found.step, self.found.left.run, self.run_again())

    @property
    def lanes(self) -> Iterator[tuple[int, Lane, Lane]]:
        """The lanes of the step that led to the difference, as both runs computed them."""
        left = self.found.left.run.lanes_of(self.found.step - 1)
        right = self.found.right.run.lanes_of(self.found.step - 1)
        return ((lane, left[lane], right[lane]) for lane in sorted(left.keys() & right.keys()))

    @property
    def tensor(self) -> str:
        return self.found.tensors[0]

    @property
    def again(self) -> str:
        result = "gave the same bits again" if self.reproducible else "gave other bits"
        return f"A second run with {self.found.left.run.label} {result}"

    def carried(self, lane: int, left: Lane, right: Lane) -> str:
        """Names a lane, and who computed it on the two sides."""
        runs = self.found.left.run.label, self.found.right.run.label
        return f"lane {lane} (worker {left.worker} with {runs[0]}, worker {right.worker} with {runs[1]})"


def judge(found: Difference, run_again: Callable[[], RunTrace]) -> Verdict:
    """The likely cause; `run_again` does the left run a second time. See Note [How a cause is told]."""
    case = Case(found, run_again)
    suspects = (by_threads, _data, by_chance, _gradient, _ended_early, by_buffer, _replicas, _start)
    verdicts = (verdict for suspect in suspects if (verdict := suspect(case)))
    return next(verdicts, None) or _between_lanes(case)


def _same_up_to(step: int, run: RunTrace, again: RunTrace) -> bool:
    return all(
        before.states.get(at) == after.states.get(at)
        for before, after in zip(run.workers, again.workers, strict=True)
        for at in range(step + 1)
    )


def by_threads(case: Case) -> Verdict | None:
    for lane, left, right in case.lanes:
        if left.threads != right.threads:
            return Verdict(
                Cause.THREADS,
                f"The two sides computed {case.carried(lane, left, right)} with {left.threads} and "
                f"{right.threads} threads, and threads change the bits of a matrix product. Let --threads "
                "set them, not the script.",
            )
    return None


def _data(case: Case) -> Verdict | None:
    for lane, left, right in case.lanes:
        if left.data != right.data:
            story = f"The data of {case.carried(lane, left, right)} differ. {case.again}"
            return _data_by_worker(story) if case.reproducible else _data_by_chance(story)
    return None


def _data_by_worker(story: str) -> Verdict:
    return Verdict(
        Cause.RANK,
        f"{story}, so what is read depends on the worker: look for run.rank, run.size or a second sharding "
        "in the data set, the sampler or the loop.",
    )


def _data_by_chance(story: str) -> Verdict:
    return Verdict(
        Cause.RANDOM,
        f"{story}, so the order or the content of the data comes from a generator lockstep does not set.",
    )


def by_chance(case: Case) -> Verdict | None:
    for lane, left, right in case.lanes:
        both = left.chance.keys() & right.chance.keys()
        moved = sorted(name for name in both if left.chance[name] != right.chance[name])
        if moved:
            return Verdict(
                Cause.RANDOM,
                f"At the end of {case.carried(lane, left, right)} {moved[0]}'s generator stands at different "
                "places, although the data are equal: the code drew more numbers on one side, or seeded it.",
            )
    return None


def _gradient(case: Case) -> Verdict | None:
    for lane, left, right in case.lanes:
        names = dict.fromkeys([*left.gradients, *right.gradients])
        differing = [name for name in names if left.gradients.get(name) != right.gradients.get(name)]
        if differing:
            story = f"The gradient of {differing[0]} differs in {case.carried(lane, left, right)}"
            return _judge_gradient(case, story, _only_rounding(left, right))
    return None


def _judge_gradient(case: Case, story: str, only_rounding: bool) -> Verdict:
    warnings = case.found.left.run.warnings or case.found.right.run.warnings
    story += " by rounding only" if only_rounding else " by more than rounding"
    story += ", although data and generators are equal"
    if warnings and (only_rounding or not case.reproducible):
        return Verdict(Cause.OPERATOR, f"{story}, and torch warned: {_short(warnings[0])}")
    if case.reproducible:
        return Verdict(
            Cause.RANK,
            f"{story}. {case.again}, so it depends on the worker: look in the forward pass and the loss for "
            "run.rank, run.size, or a value of your own (a generator, a counter) kept from lane to lane.",
        )
    if only_rounding:
        return Verdict(Cause.OPERATOR, f"{story}. {case.again}, so some operator adds in an order that varies.")
    return Verdict(
        Cause.RANDOM,
        f"{story}. {case.again}, so the forward pass draws from a generator that lockstep does not set, such "
        "as numpy.random.default_rng() without a seed.",
    )


def _only_rounding(left: Lane, right: Lane) -> bool:
    """Whether all gradients of a lane are as large on one side as on the other, up to rounding."""
    if left.gradients.keys() != right.gradients.keys():
        return False
    norms = ((left.gradients[name][1], right.gradients[name][1]) for name in left.gradients)
    return all(abs(ours - theirs) <= ROUNDING * max(ours, theirs) for ours, theirs in norms)


def _ended_early(case: Case) -> Verdict | None:
    found = case.found
    if found.tensors:
        return None
    left, right = (side.run.workers[side.worker].num_steps for side in (found.left, found.right))
    cause = Cause.RANK if case.reproducible else Cause.RANDOM
    return Verdict(
        cause,
        f"{found.left} made {left} steps, {found.right} made {right}. {case.again}. See what ends the loop.",
    )


def by_buffer(case: Case) -> Verdict | None:
    found = case.found
    state = found.left.state(found.step)
    if state is None or not state.buffers.issuperset(found.tensors):
        return None
    return Verdict(
        Cause.BUFFER,
        f"Buffer {case.tensor} differs between {found.left} and {found.right}, while all parameters and "
        "gradients are equal. What lanes write to a buffer is averaged; what is written outside of run.lanes "
        "must be the same on every worker.",
    )


def _replicas(case: Case) -> Verdict | None:
    found = case.found
    if not found.between_replicas:
        return None
    story = (
        f"Worker {found.left.worker} and worker {found.right.worker} of {found.left.run.label} hold other "
        f"values of {case.tensor}, although all workers get the same gradient. {case.again}"
    )
    if case.reproducible:
        return Verdict(
            Cause.RANK,
            f"{story}: look outside of run.lanes for what only some workers do, such as `if run.rank == 0`.",
        )
    return Verdict(Cause.RANDOM, f"{story}: code outside of run.lanes draws from a generator lockstep does not set.")


def _start(case: Case) -> Verdict | None:
    if case.found.step > case.found.left.run.workers[0].first_step:
        return None
    story = f"{case.tensor} differs before the first step. {case.again}"
    if case.reproducible:
        return Verdict(Cause.RANK, f"{story}, so the model is made differently for another number of workers.")
    return Verdict(
        Cause.RANDOM,
        f"{story}, so the model is made from random numbers that lockstep has not set. Make it after "
        "lockstep.start(), or call torch.manual_seed before.",
    )


def _between_lanes(case: Case) -> Verdict:
    story = f"{case.tensor} differs, although every lane had the same data and gradients. {case.again}"
    if case.reproducible:
        return Verdict(
            Cause.RANK,
            f"{story}, so the update depends on the workers: look at the lanes' weights, the learning rate, "
            "clipping and what else stands between the lanes and the next step.",
        )
    return Verdict(Cause.RANDOM, f"{story}, so the update draws from a generator that lockstep does not set.")


def _short(warning: str) -> str:
    return warning.split(", but you set")[0].rstrip(".") + "."


def told_of_sum(lanes: RunTrace, one_lane: RunTrace) -> str:
    """What to tell if the loss is a sum over samples: then the mean over lanes makes its gradient smaller.

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
