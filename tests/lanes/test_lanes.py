"""Shares, assignments and the summation tree, for any numbers."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import BadArgument
from lockstep.lanes import (
    Assignment,
    Branch,
    Fold,
    Root,
    Tree,
    lane_tree,
    leaves,
    present_lanes,
    reduction,
    share,
)

lane_counts = st.integers(1, 40)
worker_counts = st.integers(1, 12)
sample_counts = st.integers(1, 200)


@st.composite
def assignments(draw: st.DrawFn) -> Assignment:
    """Any lanes on any workers, workers without lanes included."""
    num_lanes, num_workers = draw(lane_counts), draw(worker_counts)
    carrier = draw(st.lists(st.integers(0, num_workers - 1), min_size=num_lanes, max_size=num_lanes))
    return Assignment.explicit([v for v in range(num_lanes) if carrier[v] == rank] for rank in range(num_workers))


def brackets(tree: Tree) -> str:
    return f"({brackets(tree.left)}+{brackets(tree.right)})" if isinstance(tree, Branch) else str(tree)


def folded(fold: Fold) -> list[str]:
    """Runs a fold's stack program on symbols."""
    stack: list[str] = []
    for lane, merges in zip(fold.lanes, fold.merges, strict=True):
        stack.append(str(lane))
        for _ in range(merges):
            top = stack.pop()
            stack[-1] = f"({stack[-1]}+{top})"
    return stack


def substituted(tree: Tree, roots: Sequence[Sequence[str]]) -> str:
    if isinstance(tree, Branch):
        return f"({substituted(tree.left, roots)}+{substituted(tree.right, roots)})"
    assert isinstance(tree, Root)
    return roots[tree.rank][tree.index]


@given(sample_counts, lane_counts)
def test_every_sample_belongs_to_exactly_one_lane(num_samples: int, num_lanes: int) -> None:
    taken = [position for lane in range(num_lanes) for position in share(num_samples, lane, num_lanes)]
    assert taken == list(range(num_samples))


@given(sample_counts, lane_counts)
def test_shares_differ_by_at_most_one_sample(num_samples: int, num_lanes: int) -> None:
    sizes = [len(share(num_samples, lane, num_lanes)) for lane in range(num_lanes)]
    assert max(sizes) - min(sizes) <= 1


least_samples = st.integers(1, 5)


@given(sample_counts, lane_counts, least_samples)
def test_with_a_least_number_of_samples_every_sample_belongs_to_exactly_one_lane_in_order(
    num_samples: int, num_lanes: int, least: int
) -> None:
    shares = [share(num_samples, lane, num_lanes, least) for lane in range(num_lanes)]
    assert [position for taken in shares for position in taken] == list(range(num_samples))
    present = present_lanes(num_samples, num_lanes, least)
    assert present == tuple(lane for lane, taken in enumerate(shares) if taken)


@given(sample_counts, lane_counts, least_samples)
def test_no_lane_has_less_than_the_least_unless_the_batch_has(num_samples: int, num_lanes: int, least: int) -> None:
    sizes = [len(share(num_samples, lane, num_lanes, least)) for lane in present_lanes(num_samples, num_lanes, least)]
    assert min(sizes) >= min(least, num_samples)
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == max(1, min(num_lanes, num_samples // least))  # no more lanes could have as many


@given(sample_counts, lane_counts, least_samples)
def test_lanes_that_hold_the_least_are_spread_as_single_samples_would_be(
    num_samples: int, num_lanes: int, least: int
) -> None:
    present = present_lanes(num_samples, num_lanes, least)
    assert present == present_lanes(len(present), num_lanes)


@given(sample_counts, lane_counts)
def test_a_least_of_one_and_batches_that_are_large_enough_are_cut_by_the_plain_rule(
    num_samples: int, num_lanes: int
) -> None:
    for lane in range(num_lanes):
        plain = range(num_samples * lane // num_lanes, num_samples * (lane + 1) // num_lanes)
        assert share(num_samples, lane, num_lanes) == plain
        assert share(num_samples + 2 * num_lanes, lane, num_lanes, 2) == share(
            num_samples + 2 * num_lanes, lane, num_lanes
        )


def test_three_samples_in_eight_lanes_are_one_lanes_if_it_needs_two() -> None:
    assert present_lanes(3, 8, 2) == (7,)
    assert [share(5, lane, 8, 2) for lane in present_lanes(5, 8, 2)] == [range(2), range(2, 5)]


@given(lane_counts, worker_counts)
def test_an_even_assignment_carries_every_lane_once_and_evenly(num_lanes: int, num_workers: int) -> None:
    assignment = Assignment.even(num_lanes, num_workers)
    counts = [len(lanes) for lanes in assignment.lanes_of]
    assert assignment.num_lanes == num_lanes
    assert assignment.num_workers == num_workers
    assert max(counts) - min(counts) <= 1


@given(assignments(), sample_counts)
def test_any_assignment_gives_the_same_brackets(assignment: Assignment, num_samples: int) -> None:
    present = present_lanes(num_samples, assignment.num_lanes)
    whole = reduction(assignment, present)
    roots = [folded(fold) for fold in whole.folds]
    tree = lane_tree(assignment.num_lanes, present)
    assert tree is not None
    assert substituted(whole.tree, roots) == brackets(tree)


@given(assignments(), sample_counts)
def test_the_wire_gets_every_root_exactly_once(assignment: Assignment, num_samples: int) -> None:
    whole = reduction(assignment, present_lanes(num_samples, assignment.num_lanes))
    expected = [Root(rank, index) for rank, count in enumerate(whole.roots_of) for index in range(count)]
    found = leaves(whole.tree)
    assert sorted(found, key=lambda root: (root.rank, root.index)) == expected  # type: ignore[union-attr]


@given(assignments(), sample_counts)
def test_roots_are_as_large_as_they_can_be(assignment: Assignment, num_samples: int) -> None:
    whole = reduction(assignment, present_lanes(num_samples, assignment.num_lanes))

    def check(tree: Tree) -> None:
        if isinstance(tree, Branch):
            ranks = {leaf.rank for leaf in leaves(tree) if isinstance(leaf, Root)}
            assert len(ranks) > 1, "one worker could have added this branch by itself"
            check(tree.left)
            check(tree.right)

    check(whole.tree)


@given(st.integers(1, 8))
def test_contiguous_lanes_need_about_log2_buffers(exponent: int) -> None:
    num_lanes = 2**exponent
    (fold,) = reduction(Assignment.even(num_lanes, 1), tuple(range(num_lanes))).folds
    assert fold.num_roots == 1
    assert fold.depth == max(1, exponent)


def test_the_depth_of_a_fold_is_what_its_program_uses() -> None:
    (fold,) = reduction(Assignment.even(8, 1), tuple(range(8))).folds
    assert (fold.merges, fold.depth) == ((0, 1, 0, 2, 0, 1, 0, 3), 3)


def test_an_absent_lane_leaves_its_sibling_unchanged() -> None:
    tree = lane_tree(4, {0, 2, 3})
    assert tree is not None
    assert brackets(tree) == "(0+(2+3))"


@pytest.mark.parametrize("lanes_of", [[[0, 0]], [[0], [2]], [[1]], [[], []]])
def test_an_assignment_that_misses_or_repeats_a_lane_is_refused(lanes_of: list[list[int]]) -> None:
    with pytest.raises(BadArgument, match="exactly once"):
        Assignment.explicit(lanes_of)


@pytest.mark.parametrize("num_lanes", [0, -1])
def test_lanes_below_one_are_refused(num_lanes: int) -> None:
    with pytest.raises(BadArgument, match="at least 1"):
        Assignment.even(num_lanes, 2)


@pytest.mark.parametrize(
    ("lanes_of", "wrong"),
    [
        (((0, 1), (1,)), "lane 1 stands there twice"),
        (((0,), (2, 3)), "lane 1 is missing, and lane 3 is there"),
        (((), ()), "it has none"),
    ],
)
def test_what_is_wrong_with_an_assignment_is_named(lanes_of: tuple[tuple[int, ...], ...], wrong: str) -> None:
    with pytest.raises(BadArgument, match=wrong):
        Assignment(lanes_of)
