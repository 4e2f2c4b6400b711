"""The proof notices: one move less, one too many, one elsewhere, or other brackets make it fail."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from lockstep.errors import BadArgument
from lockstep.lanes import Assignment, Branch, Root, Tree, reduction
from lockstep.programs.explain.proof import WrongSchedule, prove
from lockstep.programs.explain.schedules.catalogue import CATALOGUE, Algorithm, Setting
from lockstep.programs.explain.schedules.ring import ring
from lockstep.wire.schedules import AddPart, Schedule, ScheduleRound, SendPart, direct

ALL = [
    pytest.param(algorithm, id=f"{collective}-{name}")
    for collective, algorithms in CATALOGUE.items()
    for name, algorithm in algorithms.items()
]
EXACT = [case for case in ALL if case.values[0].exact]  # type: ignore[attr-defined]
SETTING = Setting(5, hosts=((0, 1, 2), (3, 4)), source=2)


def with_sends(schedule: Schedule, number: int, sends: tuple[SendPart, ...]) -> Schedule:
    rounds = list(schedule.rounds)
    rounds[number] = ScheduleRound(sends, rounds[number].adds)
    return replace(schedule, rounds=tuple(rounds))


def with_adds(schedule: Schedule, number: int, adds: tuple[AddPart, ...]) -> Schedule:
    rounds = list(schedule.rounds)
    rounds[number] = ScheduleRound(rounds[number].sends, adds)
    return replace(schedule, rounds=tuple(rounds))


def places(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Every send, as the number of its round and its position in it."""
    for number, moves in enumerate(schedule.rounds):
        for position in range(len(moves.sends)):
            yield number, position


def believed(mutants: Iterator[Schedule]) -> int:
    """How many of the wrong schedules the proof takes for right."""
    num_believed = 0
    for mutant in mutants:
        try:
            prove(mutant)
        except WrongSchedule:
            continue
        num_believed += 1
    return num_believed


def rotated(tree: Tree) -> Tree | None:
    """The same leaves in the same order with other brackets: (a+b)+c becomes a+(b+c), or the other way round."""
    if not isinstance(tree, Branch):
        return None
    if isinstance(tree.left, Branch):
        return Branch(tree.left.left, Branch(tree.left.right, tree.right))
    if isinstance(tree.right, Branch):
        return Branch(Branch(tree.left, tree.right.left), tree.right.right)
    return None


@pytest.mark.parametrize("algorithm", ALL)
def test_a_dropped_send_is_found(algorithm: Algorithm) -> None:
    right = algorithm.schedule(SETTING)
    mutants = (
        with_sends(right, number, sends[:position] + sends[position + 1 :])
        for number, position in places(right)
        for sends in [right.rounds[number].sends]
    )
    assert believed(mutants) == 0


@pytest.mark.parametrize("algorithm", ALL)
def test_a_duplicated_send_is_found(algorithm: Algorithm) -> None:
    right = algorithm.schedule(SETTING)
    mutants = (
        with_sends(right, number, (*sends, sends[position]))
        for number, position in places(right)
        for sends in [right.rounds[number].sends]
    )
    assert believed(mutants) == 0


@pytest.mark.parametrize("algorithm", ALL)
def test_a_send_of_another_part_is_found(algorithm: Algorithm) -> None:
    right = algorithm.schedule(SETTING)
    mutants = (
        with_sends(right, number, (*sends[:position], wrong, *sends[position + 1 :]))
        for number, position in places(right)
        for sends in [right.rounds[number].sends]
        for wrong in [replace(sends[position], part=sends[position].part + 1)]
    )
    assert believed(mutants) == 0


@pytest.mark.parametrize("algorithm", EXACT)
def test_other_brackets_are_found(algorithm: Algorithm) -> None:
    right = algorithm.schedule(SETTING)
    mutants = [
        with_adds(right, number, (*moves.adds[:position], replace(add, tree=tree), *moves.adds[position + 1 :]))
        for number, moves in enumerate(right.rounds)
        for position, add in enumerate(moves.adds)
        if (tree := rotated(add.tree)) is not None
    ]
    assert mutants
    assert believed(iter(mutants)) == 0


@pytest.mark.parametrize("algorithm", EXACT)
def test_swapped_operands_are_the_same_bits(algorithm: Algorithm) -> None:
    right = algorithm.schedule(SETTING)
    moves = right.rounds[-1] if right.rounds[-1].adds else next(moves for moves in right.rounds if moves.adds)
    add = moves.adds[0]
    if isinstance(add.tree, Branch):
        swapped = replace(add, tree=Branch(add.tree.right, add.tree.left))
        right = with_adds(right, right.rounds.index(moves), (swapped, *moves.adds[1:]))
    prove(right)


def test_a_reduction_with_other_brackets_than_the_lanes_is_found() -> None:
    whole = reduction(Assignment.even(4, 4), (0, 1, 2, 3))
    chain: Tree = Root(0, 0)
    for rank in (1, 2, 3):
        chain = Branch(chain, Root(rank, 0))
    with pytest.raises(WrongSchedule, match="has other brackets than the summation tree"):
        prove(direct(replace(whole, tree=chain)))


def test_workers_that_add_in_their_own_order_are_found_although_nothing_is_missing() -> None:
    """Everyone adds its neighbour's value, then that of the worker opposite: all sums are whole, in two kinds."""
    rounds = tuple(
        ScheduleRound(tuple(SendPart(rank, (rank + distance) % 4, part=0, adds=True) for rank in range(4)))
        for distance in (1, 2)
    )
    with pytest.raises(
        WrongSchedule, match=r"worker 1, part 0: \(\(0\+1\)\+\(2\+3\)\) has other brackets than .* on worker 0"
    ):
        prove(Schedule(4, rounds, "all_reduce", 1))


def test_the_error_names_the_round_the_worker_and_the_part() -> None:
    right = ring(4)
    early = replace(right, rounds=(right.rounds[-1], *right.rounds[:-1]))
    with pytest.raises(WrongSchedule) as caught:
        prove(early)
    assert str(caught.value) == ("round 3: worker 1, part 2: adds 0 and (0+3), which count a contribution twice")


def test_a_send_of_what_is_not_there_names_both_workers() -> None:
    moves = ScheduleRound((SendPart(0, 1, part=1),))
    with pytest.raises(
        WrongSchedule, match="round 1: worker 0, part 1: sends the running value to worker 1 without having it"
    ):
        prove(Schedule(2, (moves,), "all_gather", 2))


def test_a_contribution_that_counts_twice_is_found_where_it_happens() -> None:
    moves = ScheduleRound((SendPart(0, 1, part=0, adds=True),))
    with pytest.raises(
        WrongSchedule, match=r"round 2: worker 1, part 0: adds \(0\+1\) and 0, which count a contribution twice"
    ):
        prove(Schedule(2, (moves, moves), "all_reduce", 1))


def test_a_move_of_a_worker_that_does_not_exist_is_found() -> None:
    with pytest.raises(WrongSchedule, match="there are only workers 0 to 1"):
        prove(Schedule(2, (ScheduleRound((SendPart(0, 2, part=0),)),), "all_reduce", 1))


def test_an_addition_cannot_use_a_sum_of_the_same_round() -> None:
    whole = reduction(Assignment.even(1, 1), (0,))
    adds = (AddPart(0, 0, Root(0, 0), root=Root(0, 1)), AddPart(0, 0, Root(0, 1)))
    with pytest.raises(
        WrongSchedule, match=r"round 1: worker 0, part 0: adds Root\(rank=0, index=1\) without having it"
    ):
        prove(Schedule(1, (ScheduleRound((), adds),), "all_reduce", 1, whole))


def test_a_name_that_stands_for_two_sums_is_found() -> None:
    whole = reduction(Assignment.even(2, 2), (0, 1))
    rounds = (ScheduleRound((SendPart(1, 0, 0, Root(1, 0)),), (AddPart(0, 0, Root(0, 0), root=Root(1, 0)),)),)
    with pytest.raises(WrongSchedule, match="root 0 of worker 1 is the name of two different sums"):
        prove(Schedule(2, rounds, "all_reduce", 1, whole))


def test_a_reduce_scatter_needs_a_part_for_every_worker() -> None:
    with pytest.raises(BadArgument, match="reduce_scatter needs one part for each of 4 workers"):
        Schedule(4, (), "reduce_scatter", 2)
