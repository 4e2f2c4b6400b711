"""Why a run differs from a calm one after something has happened to it, judged from their traces. Without torch.

# Note [What a fault brings to light]
# The calm runs were all equal, so neither chance nor the number of workers is the cause. Up to the fault everything was
# equal too. Where a lane's data and generators are equal and its gradient is not, the script keeps something that the
# lane depends on: for the samples of each lane, if it shows as soon as a lane has moved to another worker; for itself,
# if it shows only where a worker, or all of them, have run the script from the top. Where no lane differs, it is
# something between the lanes and the next step: a rate, or an average.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.verify.cause import Case, Cause, Verdict, by_buffer, by_chance, by_threads
from lockstep.verify.compare import Difference
from lockstep.verify.evidence import Lane

TRACK = (
    "Give it to run.replicate(model, optimizer, name=object): whatever has a state_dict and a load_state_dict goes to "
    "workers that join, and into checkpoints."
)
CARRY = "Keep it in run.carried, which goes where the lane goes."
COUNT = "Count by run.step and run.epochs, which go on."


@dataclass(frozen=True)
class Happened:
    """What was done to the run: `step` is the first that was computed afterwards.

    `slot` is the worker that was replaced; None if the run was stopped and resumed. `may_move`: a run in which lanes
    moved to other workers was equal all the same.
    """

    step: int
    slot: int | None = None
    may_move: bool = True


def judge_fault(found: Difference, happened: Happened) -> Verdict:
    """The likely cause. See Note [What a fault brings to light]."""
    case = Case(found, lambda: found.left.run)
    suspects: tuple[Callable[[], Verdict | None], ...] = (
        lambda: _before(found, happened),
        lambda: _ended_elsewhere(found),
        lambda: _set_when_resumed(case, happened),
        lambda: by_threads(case),
        lambda: _data(case),
        lambda: by_chance(case),
        lambda: _gradient(case, happened),
        lambda: by_buffer(case),
        lambda: _rate(found),
    )
    verdicts = (verdict for suspect in suspects if (verdict := suspect()))
    return next(verdicts, None) or _update(case)


def _before(found: Difference, happened: Happened) -> Verdict | None:
    is_resumed = happened.slot is None and found.tensors and _first_step(found) == happened.step
    if found.step > happened.step or is_resumed:
        return None
    return Verdict(
        Cause.RANDOM,
        f"It differs after {found.step} steps, before anything had happened to it: the script does not give the same "
        "bits twice. It draws from a generator that lockstep does not set, or depends on time.",
    )


def _first_step(found: Difference) -> int:
    return found.right.run.workers[found.right.worker].first_step


def _ended_elsewhere(found: Difference) -> Verdict | None:
    if found.tensors:
        return None
    calm, disturbed = (
        max((step for worker in side.run.workers for step in worker.states), default=0)
        for side in (found.left, found.right)
    )
    return Verdict(
        Cause.COUNT,
        f"It ended after {disturbed} steps, the calm run after {calm}: the loop is ended by something that the script "
        f"counts itself (enumerate, range, a number of batches before `break`). {COUNT}",
    )


def _set_when_resumed(case: Case, happened: Happened) -> Verdict | None:
    if case.found.step > happened.step:
        return None
    return Verdict(
        Cause.UNTRACKED,
        f"{case.tensor} differs where the run goes on, before its first step: the script sets it after the run was put "
        "where the checkpoint was taken (weights of its own checkpoint, say). Set it before run.epochs is asked, or "
        "leave it to the run.",
    )


def _data(case: Case) -> Verdict | None:
    for lane, left, right in case.lanes:
        if left.data != right.data:
            return Verdict(
                Cause.DATA,
                f"In step {case.found.step - 1} the data of {_named(lane, left, right)} differ: what is read depends "
                "on what was read before, in a sampler or a data set that remembers, or the loop takes its batches by "
                "a count of its own. Derive the order from the epoch (set_epoch) or from torch's global generator, and "
                "let run.shard load it.",
            )
    return None


def _gradient(case: Case, happened: Happened) -> Verdict | None:
    differing = [(lane, left, right) for lane, left, right in case.lanes if left.gradients != right.gradients]
    if not differing:
        return None
    lane, left, right = min(differing, key=lambda found: found[1].worker == found[2].worker)  # one that has moved
    name = next(n for n in {**left.gradients, **right.gradients} if left.gradients.get(n) != right.gradients.get(n))
    story = (
        f"In step {case.found.step - 1} the gradient of {name} differs in {_named(lane, left, right)}, although model, "
        "data and generators were equal"
    )
    if _is_of_lanes(case, happened):
        return Verdict(
            Cause.CARRIED,
            f"{story}: the script carries something from batch to batch for the samples of a lane (the hidden state of "
            f"an RNN, say), and it stayed behind. {CARRY}",
        )
    return Verdict(
        Cause.UNTRACKED,
        f"{story}: something that the loss depends on (a weight of it that grows, a hidden state, a memory) has begun "
        f"anew where the script was run from the top. {TRACK} If it belongs to the samples of a lane: {CARRY}",
    )


def _is_of_lanes(case: Case, happened: Happened) -> bool:
    """Whether lanes alone have lost something: nobody had run the script anew, or lanes may not even move."""
    return not happened.may_move if happened.slot is None else case.found.step - 1 == happened.step


def _named(lane: int, left: Lane, right: Lane) -> str:
    return f"lane {lane} (worker {left.worker} in the calm run, worker {right.worker} here)"


def _rate(found: Difference) -> Verdict | None:
    for step in (found.step - 1, found.step):
        calm, disturbed = found.left.state(step), found.right.state(step)
        if calm is None or disturbed is None:
            continue
        for name, rate in calm.rates.items():
            other = disturbed.rates.get(name)
            if other is not None and other != rate:
                return Verdict(
                    Cause.UNTRACKED,
                    f"After {step} steps the learning rate of {name} is {other:g} and was {rate:g} in the calm run: a "
                    "scheduler, or a number of the script's own from which the rate is made, has begun anew. "
                    f"{TRACK}",
                )
    return None


def _update(case: Case) -> Verdict:
    return Verdict(
        Cause.UNTRACKED,
        f"{case.tensor} differs, although every lane had the same data and gradients, and the rates are equal: "
        "something between the lanes and the next step (an average of weights, sums of gradients, a count) has begun "
        f"anew. {TRACK}",
    )
