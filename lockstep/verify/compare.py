"""Where the runs of one script first part: step, tensor, and the two sides. Without torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.verify.evidence import RunTrace, State


@dataclass(frozen=True)
class Side:
    """One worker of one run."""

    run: RunTrace
    worker: int

    def state(self, step: int) -> State | None:
        """Its state after `step` updates; None if it did not come that far."""
        return self.run.workers[self.worker].states.get(step)

    def __str__(self) -> str:
        return self.run.label if self.worker == 0 else f"worker {self.worker} of {self.run.label}"


@dataclass(frozen=True)
class Difference:
    """The first difference: it shows after `step` updates (0: before the first), first in `tensors[0]`.

    No tensors mean that one side had ended before.
    """

    step: int
    left: Side
    right: Side
    tensors: tuple[str, ...]

    @property
    def between_replicas(self) -> bool:
        """Whether the two sides are workers of the same run."""
        return self.left.run is self.right.run


def first_difference(runs: Sequence[RunTrace]) -> Difference | None:
    """The earliest difference between the workers of a run, or between a run and the first one.

    At the same step the workers of one run come before different runs: they say more about the cause.
    """
    steps = sorted({step for run in runs for worker in run.workers for step in worker.states})
    pairs = [*_replicas(runs), *_against_first(runs)]
    found = (difference for step in steps for pair in pairs if (difference := _compare(step, *pair)))
    return next(found, None)


def is_equal(run: RunTrace, first: RunTrace) -> bool:
    """Whether all workers of `run` had the same bits as `first` after every step."""
    return first_difference([first, run]) is None


def difference_after(calm: RunTrace, disturbed: RunTrace) -> Difference | None:
    """The earliest difference between a calm run and one to which something happened.

    Its workers need not have been there all the time: each is held against the calm run where it was, and one of them
    must have come to the same end.
    """
    steps = sorted({step for worker in disturbed.workers for step in worker.states})
    pairs = [(Side(calm, 0), Side(disturbed, number)) for number in range(len(disturbed.workers))]
    there = ((step, pair) for step in steps for pair in pairs if pair[1].state(step) is not None)
    found = (difference for step, pair in there if (difference := _compare(step, *pair)))
    return next(found, None) or _missing_end(calm, disturbed)


def _missing_end(calm: RunTrace, disturbed: RunTrace) -> Difference | None:
    end = max(calm.workers[0].states)
    if any(end in worker.states for worker in disturbed.workers):
        return None
    return Difference(end, Side(calm, 0), Side(disturbed, 0), ())


def _replicas(runs: Sequence[RunTrace]) -> Iterator[tuple[Side, Side]]:
    return ((Side(run, 0), Side(run, rank)) for run in runs for rank in range(1, len(run.workers)))


def _against_first(runs: Sequence[RunTrace]) -> Iterator[tuple[Side, Side]]:
    return ((Side(runs[0], 0), Side(run, 0)) for run in runs[1:])


def _compare(step: int, left: Side, right: Side) -> Difference | None:
    ours, theirs = left.state(step), right.state(step)
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None:
        return Difference(step, left, right, ())
    if ours.digest == theirs.digest:
        return None
    return Difference(step, left, right, _differing(ours, theirs))


def _differing(ours: State, theirs: State) -> tuple[str, ...]:
    names = dict.fromkeys([*ours.tensors, *theirs.tensors])
    return tuple(name for name in names if ours.tensors.get(name) != theirs.tensors.get(name))
