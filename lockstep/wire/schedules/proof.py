"""The proof that a schedule does what its collective promises, by carrying it out on symbols."""

from collections import Counter
from dataclasses import dataclass

from lockstep.lanes import Reduction, lane_tree
from lockstep.wire.schedules.rehearsal import Rehearsal, Wrong
from lockstep.wire.schedules.schedule import Schedule
from lockstep.wire.schedules.symbols import Symbol

__all__ = ["Proof", "Wrong", "prove"]

AT_THE_END = "after the last round"


@dataclass(frozen=True)
class Proof:
    """What is known of a schedule that is right: its rounds, and how many parts each worker sends in them."""

    rounds: int
    num_parts: int
    parts_sent_by: tuple[int, ...]

    @property
    def most_parts_sent(self) -> int:
        return max(self.parts_sent_by)

    def most_bytes_sent(self, num_bytes: int) -> float:
        """The most that any one worker sends, for a message of `num_bytes` in equal parts."""
        return self.most_parts_sent * num_bytes / self.num_parts


def prove(schedule: Schedule) -> Proof:
    """Shows that the schedule is right, or raises `Wrong` with the round, the worker and the part.

    Nobody sends or adds what it does not hold. No two sends of a round write the same place. Every result that the
    collective demands has every contribution exactly once. All workers' results have the same brackets; with a
    reduction, those of the summation tree over its lanes.
    """
    rehearsal = Rehearsal(schedule)
    for moves in schedule.rounds:
        rehearsal.play(moves)
    check_results(rehearsal)
    sent = Counter(send.source for moves in schedule.rounds for send in moves.sends)
    return Proof(len(schedule.rounds), schedule.num_parts, tuple(sent[rank] for rank in range(schedule.num_workers)))


def check_results(rehearsal: Rehearsal) -> None:
    """Raises `Wrong` unless the running values are what the collective promises."""
    parts, workers = range(rehearsal.schedule.num_parts), range(rehearsal.schedule.num_workers)
    match rehearsal.schedule.collective:
        case "all_reduce":
            _check_sums(rehearsal, {part: list(workers) for part in parts})
        case "reduce_scatter":
            _check_sums(rehearsal, {part: [part] for part in parts})
        case "all_gather":
            _check_copies(rehearsal, list(parts))
        case "broadcast":
            _check_copies(rehearsal, [rehearsal.schedule.source for _ in parts])


def _check_copies(rehearsal: Rehearsal, owners: list[int]) -> None:
    """Every worker has each part as its owner had it."""
    for worker, running in enumerate(rehearsal.running):
        for part, (value, owner) in enumerate(zip(running, owners, strict=True)):
            if value is not rehearsal.symbols.contribution(owner):
                raise Wrong(AT_THE_END, worker, part, f"holds {value} instead of what worker {owner} had")


def _check_sums(rehearsal: Rehearsal, holders_of: dict[int, list[int]]) -> None:
    """The workers that must hold each part have the whole sum of it, in the right brackets."""
    contributions = _all_contributions(rehearsal.schedule)
    in_tree = _tree_sum(rehearsal)
    for part, holders in holders_of.items():
        at_first_holder = rehearsal.running[holders[0]][part]
        for worker in holders:
            value = rehearsal.running[worker][part]
            if value is None or value.members != contributions:
                raise Wrong(AT_THE_END, worker, part, f"{value} does not have every contribution")
            if value is not at_first_holder:
                problem = f"{value} has other brackets than {at_first_holder} on worker {holders[0]}"
                raise Wrong(AT_THE_END, worker, part, problem)
            if in_tree is not None and value is not in_tree:
                raise Wrong(AT_THE_END, worker, part, f"{value} has other brackets than the summation tree, {in_tree}")


def _all_contributions(schedule: Schedule) -> int:
    """The bits of all workers or, in an exact schedule, of all lanes that are present."""
    if schedule.reduction is None:
        return (1 << schedule.num_workers) - 1
    return sum(1 << lane for lane in _present(schedule.reduction))


def _tree_sum(rehearsal: Rehearsal) -> Symbol | None:
    """The sum that an exact schedule promises. Lanes after the last present one do not change the tree."""
    if rehearsal.schedule.reduction is None:
        return None
    present = _present(rehearsal.schedule.reduction)
    tree = lane_tree(max(present) + 1, present)
    assert tree is not None
    return rehearsal.symbols.sum_of_lanes(tree)


def _present(reduction: Reduction) -> frozenset[int]:
    return frozenset(lane for fold in reduction.folds for lane in fold.lanes)
