"""Exact schedules over any lanes and hosts: the sum has the brackets of the summation tree."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import BadArgument
from lockstep.lanes import Assignment, Branch, Reduction, Root, leaves, reduction
from lockstep.programs.explain.proof import prove
from lockstep.programs.explain.schedules.hierarchical import hierarchical
from lockstep.wire.network.hosts import host_reduction
from lockstep.wire.schedules import direct, direct_reduce_scatter, one_root_each, oneshot, slices
from lockstep.wire.transport import Hosts


@st.composite
def reductions(draw: st.DrawFn) -> Reduction:
    """Any lanes on any of 1 to 7 workers, in any order; some lanes absent, some workers without any."""
    num_workers = draw(st.integers(1, 7))
    carriers = draw(st.lists(st.integers(0, num_workers - 1), min_size=1, max_size=14))
    lanes_of = [[lane for lane, rank in enumerate(carriers) if rank == worker] for worker in range(num_workers)]
    present = draw(st.sets(st.sampled_from(range(len(carriers))), min_size=1))
    return reduction(Assignment.explicit(lanes_of), tuple(sorted(present)))


@st.composite
def hosts_of(draw: st.DrawFn, num_workers: int) -> Hosts:
    """The workers on any hosts, of any sizes, in any order."""
    ranks = draw(st.permutations(range(num_workers)))
    cuts = sorted(draw(st.sets(st.integers(1, num_workers - 1)))) if num_workers > 1 else []
    return tuple(tuple(ranks[first:last]) for first, last in zip([0, *cuts], [*cuts, num_workers], strict=True))


@given(reductions())
def test_direct_keeps_the_brackets_of_the_summation_tree(whole: Reduction) -> None:
    prove(direct(whole))


@given(reductions())
def test_direct_reduce_scatter_keeps_the_brackets_of_the_summation_tree(whole: Reduction) -> None:
    prove(direct_reduce_scatter(whole))


@given(reductions())
def test_oneshot_keeps_the_brackets_of_the_summation_tree(whole: Reduction) -> None:
    prove(oneshot(whole))


@settings(max_examples=200)
@given(st.data(), reductions())
def test_hierarchical_keeps_the_brackets_of_the_summation_tree(data: st.DataObject, whole: Reduction) -> None:
    prove(hierarchical(whole, data.draw(hosts_of(len(whole.folds)))))


@given(st.data(), reductions())
def test_a_host_adds_only_roots_of_its_own_workers(data: st.DataObject, whole: Reduction) -> None:
    hosts = data.draw(hosts_of(len(whole.folds)))
    for ranks, sums in zip(hosts, host_reduction(whole, hosts).sums_of, strict=True):
        assert all(isinstance(root, Root) and root.rank in ranks for tree in sums for root in leaves(tree))


@given(st.data(), reductions())
def test_two_sums_that_a_host_could_add_are_never_sent_apart(data: st.DataObject, whole: Reduction) -> None:
    hosts = data.draw(hosts_of(len(whole.folds)))
    waiting = [host_reduction(whole, hosts).tree]
    while waiting:
        if isinstance(node := waiting.pop(), Branch):
            waiting += [node.left, node.right]
            assert len({root.rank for root in leaves(node) if isinstance(root, Root)}) > 1


def test_only_one_sum_of_each_host_crosses_the_network_when_hosts_have_whole_subtrees() -> None:
    hosts = ((0, 1, 2, 3), (4, 5, 6, 7))
    cut = host_reduction(one_root_each(8), hosts)
    assert (list(map(len, cut.sums_of)), cut.tree) == ([1, 1], Branch(Root(0, 0), Root(1, 0)))


def test_only_one_worker_of_each_column_talks_to_other_hosts() -> None:
    hosts = ((0, 1), (2, 3), (4, 5))
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    schedule = hierarchical(one_root_each(6), hosts)
    between = {
        (send.source % 2, send.target % 2)
        for moves in schedule.rounds
        for send in moves.sends
        if host_of[send.source] != host_of[send.target]
    }
    assert between == {(0, 0), (1, 1)}


@pytest.mark.parametrize("hosts", [((0, 1),), ((0, 1), (1, 2)), ((0, 1, 2), ()), ((0, 1, 2, 3),)])
def test_hosts_that_do_not_hold_every_worker_once_are_refused(hosts: Hosts) -> None:
    with pytest.raises(BadArgument, match="hosts must name each of the workers 0 to 2 once"):
        hierarchical(one_root_each(3), hosts)


@given(st.integers(0, 1000), st.integers(1, 20))
def test_slices_cover_a_bucket_without_overlap(num_elements: int, num_workers: int) -> None:
    covered = [element for span in slices(num_elements, num_workers) for element in span]
    assert covered == list(range(num_elements))
