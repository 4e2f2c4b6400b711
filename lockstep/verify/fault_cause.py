"""Why a run differs from a calm one after a fault, judged from their traces. Without torch.

# Note [What a fault brings to light]
# The calm runs were all equal, so neither chance nor the number of workers is the cause. Up to the fault everything was
# equal too. Where a lane's data and generators are equal and its gradient is not, the script keeps something that the
# lane depends on: for the samples of each lane, if it shows as soon as a lane has moved to another worker; for itself,
# if it shows only where a worker, or all of them, have run the script from the top. Where no lane differs, it is
# something between the lanes and the next step: a rate, or an average.
"""

from dataclasses import dataclass

from lockstep.verify.cause import (
    Case,
    DifferenceCause,
    LikelyCause,
    by_buffer,
    by_chance,
    by_threads,
    differing_gradient,
)
from lockstep.verify.evidence import Lane, TraceDifference

TRACK = (
    "Give it to run.replicate(model, optimizer, name=object): whatever has a state_dict and a load_state_dict goes to "
    "workers that join, and into checkpoints."
)
CARRY = "Keep it in run.carried, which goes where the lane goes."
COUNT = "Count by run.step and run.epochs, which go on."


@dataclass(frozen=True)
class AppliedFault:
    """What was done to the run: `step` is the first that was computed afterwards.

    `slot` is the worker that was replaced; None if the run was stopped and resumed. `may_move`: a run in which lanes
    moved to other workers was equal all the same.
    """

    step: int
    slot: int | None = None
    may_move: bool = True


def judge_fault(difference: TraceDifference, fault: AppliedFault) -> LikelyCause:
    """The likely cause. See Note [What a fault brings to light]."""
    case = Case(difference, lambda: difference.left.run)
    return (
        _before(difference, fault)
        or _ended_elsewhere(difference)
        or _set_when_resumed(case, fault)
        or by_threads(case)
        or _data(case)
        or by_chance(case)
        or _gradient(case, fault)
        or by_buffer(case)
        or _rate(difference)
        or _update(case)
    )


def _before(difference: TraceDifference, fault: AppliedFault) -> LikelyCause | None:
    first_step = difference.right.run.workers[difference.right.worker].first_step if difference.tensors else None
    is_resumed = fault.slot is None and first_step == fault.step
    if difference.step > fault.step or is_resumed:
        return None
    return LikelyCause(
        DifferenceCause.RANDOM,
        f"It differs after {difference.step} steps, before anything had happened to it: the script does not give the "
        "same bits twice. It draws from a generator that lockstep does not set, or depends on time.",
    )


def _ended_elsewhere(difference: TraceDifference) -> LikelyCause | None:
    if difference.tensors:
        return None
    calm, disturbed = difference.left.run.last_step, difference.right.run.last_step
    return LikelyCause(
        DifferenceCause.COUNT,
        f"It ended after {disturbed} steps, the calm run after {calm}: the loop is ended by something that the script "
        f"counts itself (enumerate, range, a number of batches before `break`). {COUNT}",
    )


def _set_when_resumed(case: Case, fault: AppliedFault) -> LikelyCause | None:
    if case.difference.step > fault.step:
        return None
    return LikelyCause(
        DifferenceCause.UNTRACKED,
        f"{case.tensor} differs where the run goes on, before its first step: the script sets it after the run was put "
        "where the checkpoint was taken (weights of its own checkpoint, say). Set it before run.epochs is asked, or "
        "leave it to the run.",
    )


def _data(case: Case) -> LikelyCause | None:
    for lane, left, right in case.lanes:
        if left.data != right.data:
            return LikelyCause(
                DifferenceCause.DATA,
                f"In step {case.difference.step - 1} the data of {_named(lane, left, right)} differ: what is read "
                "depends on what was read before, in a sampler or a data set that remembers, or the loop takes its "
                "batches by a count of its own. Derive the order from the epoch (set_epoch) or from torch's global "
                "generator, and let run.shard load it.",
            )
    return None


def _gradient(case: Case, fault: AppliedFault) -> LikelyCause | None:
    differing = [(lane, left, right) for lane, left, right in case.lanes if left.gradients != right.gradients]
    if not differing:
        return None
    lane, left, right = min(differing, key=lambda both: both[1].worker == both[2].worker)  # one that has moved
    story = (
        f"In step {case.difference.step - 1} the gradient of {differing_gradient(left, right)} differs in "
        f"{_named(lane, left, right)}, although model, data and generators were equal"
    )
    if _is_of_lanes(case, fault):
        return LikelyCause(
            DifferenceCause.CARRIED,
            f"{story}: the script carries something from batch to batch for the samples of a lane (the hidden state of "
            f"an RNN, say), and it stayed behind. {CARRY}",
        )
    return LikelyCause(
        DifferenceCause.UNTRACKED,
        f"{story}: something that the loss depends on (a weight of it that grows, a hidden state, a memory) has begun "
        f"anew where the script was run from the top. {TRACK} If it belongs to the samples of a lane: {CARRY}",
    )


def _is_of_lanes(case: Case, fault: AppliedFault) -> bool:
    """Whether lanes alone have lost something: no worker had run the script again, or lanes may not even move."""
    return not fault.may_move if fault.slot is None else case.difference.step - 1 == fault.step


def _named(lane: int, left: Lane, right: Lane) -> str:
    return f"lane {lane} (worker {left.worker} in the calm run, worker {right.worker} here)"


def _rate(difference: TraceDifference) -> LikelyCause | None:
    for step in (difference.step - 1, difference.step):
        calm, disturbed = difference.left.state(step), difference.right.state(step)
        if calm is None or disturbed is None:
            continue
        for name, rate in calm.rates.items():
            other = disturbed.rates.get(name)
            if other is not None and other != rate:
                return LikelyCause(
                    DifferenceCause.UNTRACKED,
                    f"After {step} steps the learning rate of {name} is {other:g} and was {rate:g} in the calm run: a "
                    "scheduler, or a number of the script's own from which the rate is made, has begun anew. "
                    f"{TRACK}",
                )
    return None


def _update(case: Case) -> LikelyCause:
    return LikelyCause(
        DifferenceCause.UNTRACKED,
        f"{case.tensor} differs, although every lane had the same data and gradients, and the rates are equal: "
        "something between the lanes and the next step (an average of weights, sums of gradients, a count) has begun "
        f"anew. {TRACK}",
    )
