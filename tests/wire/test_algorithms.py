"""Schedules, run on symbols: each worker ends with every contribution once, bracketed by the lane tree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.lanes import Assignment, Branch, Root, Tree, present_lanes, reduction
from lockstep.wire.schedules import Schedule, direct, slices


def brackets(tree: Tree) -> str:
    return f"({brackets(tree.left)}+{brackets(tree.right)})" if isinstance(tree, Branch) else str(tree)


def run_on_symbols(schedule: Schedule, roots_of: tuple[int, ...]) -> list[dict[int, str]]:
    """What each worker holds of each slice of the sum after the schedule."""
    workers = range(schedule.num_workers)
    held: list[set[tuple[Root, int]]] = [
        {(Root(rank, index), part) for index in range(roots_of[rank]) for part in workers} for rank in workers
    ]
    sums: list[dict[int, str]] = [{} for _ in workers]
    for moves in schedule.rounds:
        arrivals: list[tuple[int, Root | None, int, str]] = []
        for send in moves.sends:
            if send.root is None:
                arrivals.append((send.target, None, send.part, sums[send.source][send.part]))
            else:
                assert (send.root, send.part) in held[send.source], "sends what it does not hold"
                arrivals.append((send.target, send.root, send.part, ""))
        for target, root, part, value in arrivals:
            if root is None:
                sums[target][part] = value
            else:
                held[target].add((root, part))
        for add in moves.adds:
            _check_held(add.tree, add.part, held[add.worker])
            sums[add.worker][add.part] = brackets(add.tree)
    return sums


def _check_held(tree: Tree, part: int, held: set[tuple[Root, int]]) -> None:
    if isinstance(tree, Branch):
        _check_held(tree.left, part, held)
        _check_held(tree.right, part, held)
    else:
        assert (tree, part) in held, "adds what has not arrived"


@pytest.mark.parametrize("num_workers", range(1, 17))
def test_direct_leaves_the_whole_sum_in_tree_order_on_every_worker(num_workers: int) -> None:
    whole = reduction(Assignment.even(24, num_workers), present_lanes(100, 24))
    sums = run_on_symbols(direct(whole), whole.roots_of)
    assert sums == [{part: brackets(whole.tree) for part in range(num_workers)}] * num_workers


@pytest.mark.parametrize("num_workers", range(2, 17))
def test_direct_sends_what_its_cost_line_says(num_workers: int) -> None:
    """One root per worker: 2·(W-1)/W of the bytes from each, in two rounds."""
    whole = reduction(Assignment.even(num_workers, num_workers), tuple(range(num_workers)))
    schedule = direct(whole)
    assert len(schedule.rounds) == 2
    for rank in range(num_workers):
        sent = sum(send.source == rank for moves in schedule.rounds for send in moves.sends)
        assert sent == 2 * (num_workers - 1)


@given(st.integers(0, 1000), st.integers(1, 20))
def test_slices_cover_a_bucket_without_overlap(num_elements: int, num_workers: int) -> None:
    covered = [element for span in slices(num_elements, num_workers) for element in span]
    assert covered == list(range(num_elements))
