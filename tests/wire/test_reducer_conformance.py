"""The conformance suite of reducers: what each method leaves on every worker, on every wire, against sums by hand.

The reducers of GPUs run here with the CPU in the place of a GPU; tests/gpu/wire_on_gpu.py has the same on a real one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from sums_by_hand import CPU, by_hand, random_roots
from test_gpu_memory import Opened
from test_slices import opened
from test_wires import open_wire
from workers import on_workers, outcomes

from lockstep.errors import BadArgument
from lockstep.lanes import Assignment, Reduction, Root, present_lanes, reduction
from lockstep.wire import Reducer
from lockstep.wire.reducer import check_slices
from lockstep.wire.shared.reducer import SharedMemoryReducer

EXACT_WIRES = ("gloo", "shared", "hierarchical", "gpu memory", "nccl slices")
NATIVE_WIRES = ("gloo native", "nccl native")
WIRES = pytest.mark.parametrize("kind", EXACT_WIRES)
WORLDS = pytest.mark.parametrize(
    "num_workers", [1, *(pytest.param(more, marks=pytest.mark.soak) for more in (2, 4, 5)), 3]
)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
NUM_ELEMENTS = (0, 1, 7, 1001)


@contextmanager
def open_reducer(kind: str) -> Iterator[tuple[Reducer, int, int]]:
    """The reducer of a wire, this worker's rank, and the number of workers."""
    if kind.startswith("nccl"):
        transport, reducer = opened(exact=kind == "nccl slices")
        yield reducer, transport.world.rank, transport.world.size
        transport.close()
    elif kind == "gpu memory":
        gpu = Opened()
        yield gpu.reducer, gpu.world.rank, gpu.world.size
        gpu.end()
    else:
        with open_wire(kind) as wire:
            yield wire.reducer, wire.world.rank, wire.world.size


def reductions(size: int) -> list[Reduction]:
    """One root each; several roots; and several with absent lanes, which leave some workers of four without any."""
    dealt = Assignment.explicit([range(rank, 9, size) for rank in range(size)])
    return [
        reduction(Assignment.even(size, size), tuple(range(size))),
        reduction(dealt, tuple(range(9))),
        reduction(Assignment.even(8, size), present_lanes(3, 8)),
    ]


def cuts(num_elements: int, size: int) -> list[list[range]]:
    """Uneven slices; all for the last worker; and slices that lie in another order than the ranks."""
    bounds = [0, *(min(num_elements, 1 + 3 * rank**2) for rank in range(size - 1)), num_elements]
    uneven = [range(bounds[rank], bounds[rank + 1]) for rank in range(size)]
    last = [range(0)] * (size - 1) + [range(num_elements)]
    return [uneven, last, uneven[::-1]]


class Case:
    """One sum of one dtype and size: this worker's roots and place for it, and what all of it should be."""

    def __init__(self, reducer: Reducer, whole: Reduction, rank: int, dtype: torch.dtype, size: int, own: bool) -> None:
        roots = random_roots(whole, size, dtype)
        self.wanted = by_hand(whole.tree, roots)
        make: Callable[..., torch.Tensor] = reducer.allocate if own else lambda n, d, _: torch.empty(n, dtype=d)
        self.roots = [make(size, dtype, CPU).copy_(roots[Root(rank, index)]) for index in range(whole.roots_of[rank])]
        self.total = self.roots[0] if self.roots and own else make(size, dtype, CPU)


def every_case(reducer: Reducer, rank: int, size: int, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[Any]:
    for number, whole in enumerate(reductions(size)):
        for dtype in dtypes:
            for num_elements in NUM_ELEMENTS:
                for own in (True, False) if dtype is DTYPES[0] else (True,):
                    name = f"{number}, {dtype}, {num_elements} elements, {'own' if own else 'foreign'} memory"
                    yield name, whole, Case(reducer, whole, rank, dtype, num_elements, own)


def wrong_reductions(reducer: Reducer, rank: int, size: int) -> list[str]:
    """Which sums are wrong."""
    wrong = []
    for name, whole, case in every_case(reducer, rank, size):
        reducer.reduce(whole, case.roots, case.total)
        reducer.synchronize()
        if not torch.equal(case.total, case.wanted):
            wrong.append(name)
    return wrong


def wrong_unclosed_reductions(reducer: Reducer, rank: int, size: int) -> list[str]:
    """Which sums are wrong after the closing barrier, and whether workers agree that there was one."""
    wrong = []
    for name, whole, case in every_case(reducer, rank, size, (torch.float32,)):
        total = reducer.allocate(case.total.numel(), torch.float32, CPU)
        reducer.reduce_unclosed(whole, case.roots, total)
        was_open = reducer.closing_barrier()
        if not torch.equal(total, case.wanted) or reducer.closing_barrier():
            wrong.append(name)
        if was_open != (isinstance(reducer, SharedMemoryReducer) and total.numel() > 0):
            wrong.append(f"{name}: open is {was_open}")
    return wrong


def wrong_by_other_trees(reducer: Reducer, rank: int, size: int) -> list[str]:
    """Lanes move to other workers, and the same memory is added up in other brackets; which sums are wrong."""
    wrong = []
    root, total = (reducer.allocate(1001, torch.float32, CPU) for _ in range(2))
    for lanes in ([*range(size)], [*range(1, size), 0], [*range(size)]):
        whole = reduction(Assignment.explicit([[lane] for lane in lanes]), tuple(range(size)))
        roots = random_roots(whole, 1001, torch.float32)
        root.copy_(roots[Root(rank, 0)])
        reducer.reduce(whole, [root], total)
        reducer.synchronize()
        if not torch.equal(total, by_hand(whole.tree, roots)):
            wrong.append(f"lanes {lanes}")
    return wrong


def wrong_after_an_open_one(reducer: Reducer, rank: int, size: int) -> list[str]:
    """Each collective follows a reduction that nobody has closed; which results are wrong."""
    wrong = []
    whole = reductions(size)[0]
    slices = cuts(1001, size)[0]
    own = slices[rank]
    for name in ("reduce", "reduce_unclosed", "reduce_scatter", "all_gather"):
        left = Case(reducer, whole, rank, torch.float32, 1001, own=True)
        reducer.reduce_unclosed(whole, left.roots, left.total)
        case = Case(reducer, whole, rank, torch.float32, 1001, own=True)
        if name == "all_gather":
            case.total[own.start : own.stop] = case.wanted[own.start : own.stop]
            reducer.all_gather(case.total, slices)
        elif name == "reduce_scatter":
            reducer.reduce_scatter(whole, case.roots, case.total, slices)
            case.wanted, case.total = case.wanted[own.start : own.stop], case.total[own.start : own.stop]
        else:
            getattr(reducer, name)(whole, case.roots, case.total)
        reducer.closing_barrier()
        if not torch.equal(left.total, left.wanted) or not torch.equal(case.total, case.wanted):
            wrong.append(name)
    return wrong


def wrong_scatters(reducer: Reducer, rank: int, size: int) -> list[str]:
    """Which workers' slices of a sum are wrong."""
    wrong = []
    for number in range(3):
        for name, whole, case in every_case(reducer, rank, size, (torch.float32, torch.bfloat16)):
            slices = cuts(case.total.numel(), size)[number]
            reducer.reduce_scatter(whole, case.roots, case.total, slices)
            reducer.synchronize()
            own = slices[rank]
            if not torch.equal(case.total[own.start : own.stop], case.wanted[own.start : own.stop]):
                wrong.append(f"{name}, slices {number}")
    return wrong


def wrong_gathers(reducer: Reducer, rank: int, size: int) -> list[str]:
    """Which tensors do not hold every worker's slice, of any dtype, in memory of the reducer and in other memory."""
    wrong = []
    for dtype in DTYPES:
        for num_elements in NUM_ELEMENTS:
            for number, slices in enumerate(cuts(num_elements, size)):
                for own in (True, False):
                    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(1)).to(dtype)
                    total = reducer.allocate(num_elements, dtype, CPU) if own else torch.empty_like(values)
                    total.fill_(-1)
                    mine = slices[rank]
                    total[mine.start : mine.stop] = values[mine.start : mine.stop]
                    for _ in range(2):
                        reducer.all_gather(total, slices)
                        reducer.synchronize()
                        if not torch.equal(total, values):
                            wrong.append(f"{dtype}, {num_elements} elements, slices {number}, {own}")
    return wrong


CLAIMS = {
    "reduce": wrong_reductions,
    "reduce_unclosed": wrong_unclosed_reductions,
    "reduce_scatter": wrong_scatters,
    "all_gather": wrong_gathers,
    "left open": wrong_after_an_open_one,
    "other trees": wrong_by_other_trees,
}


def _check_all(kind: str) -> dict[str, list[str]]:
    with open_reducer(kind) as (reducer, rank, size):
        return {name: wrong(reducer, rank, size) for name, wrong in CLAIMS.items()}


def wrong(kind: str, num_workers: int, claim: str) -> list[str]:
    """What is wrong with a claim on any worker. All claims about a wire share its workers."""
    found = _on_wire(kind, num_workers)
    return [f"worker {rank}: {name}" for rank, by_claim in enumerate(found) for name in by_claim[claim]]


@cache
def _on_wire(kind: str, num_workers: int) -> list[dict[str, list[str]]]:
    return on_workers(num_workers, _check_all, kind)


@WIRES
@WORLDS
def test_reduce_leaves_the_sum_in_the_brackets_of_the_tree_on_every_worker(kind: str, num_workers: int) -> None:
    assert wrong(kind, num_workers, "reduce") == []


@WIRES
@WORLDS
def test_the_same_memory_is_added_up_in_the_brackets_of_each_tree(kind: str, num_workers: int) -> None:
    assert wrong(kind, num_workers, "other trees") == []


@WIRES
@WORLDS
def test_an_unclosed_reduction_is_whole_after_the_closing_barrier(kind: str, num_workers: int) -> None:
    assert wrong(kind, num_workers, "reduce_unclosed") == []


@WIRES
@WORLDS
def test_every_collective_closes_a_reduction_that_was_left_open(kind: str, num_workers: int) -> None:
    assert wrong(kind, num_workers, "left open") == []


@WIRES
@WORLDS
def test_reduce_scatter_leaves_each_worker_the_bits_of_reduce_in_its_slice(kind: str, num_workers: int) -> None:
    assert wrong(kind, num_workers, "reduce_scatter") == []


@WIRES
@WORLDS
def test_all_gather_leaves_every_slice_on_every_worker(kind: str, num_workers: int) -> None:
    assert wrong(kind, num_workers, "all_gather") == []


def _scattered_natively(kind: str) -> list[bool]:
    """Whether native reduce-scatters have the bits of the native reduction, near the sum, and gathers are whole."""
    found = []
    with open_reducer(kind) as (reducer, rank, size):
        for whole in reductions(size):
            first, second = (Case(reducer, whole, rank, torch.float64, 1001, own=False) for _ in range(2))
            own = cuts(1001, size)[0][rank]
            reducer.reduce(whole, first.roots, first.total)
            reducer.reduce_scatter(whole, second.roots, second.total, cuts(1001, size)[0])
            reducer.synchronize()
            found.append(torch.equal(first.total[own.start : own.stop], second.total[own.start : own.stop]))
            found.append(torch.allclose(first.total, first.wanted))
        found.append(not wrong_gathers(reducer, rank, size))
    return found


@pytest.mark.parametrize("kind", NATIVE_WIRES)
@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_native_reduce_scatter_has_the_bits_of_the_native_reduction(kind: str, num_workers: int) -> None:
    assert on_workers(num_workers, _scattered_natively, kind) == [[True] * 7] * num_workers


def _scattered_by(kind: str, slices_of: list[list[list[int]]]) -> None:
    with open_reducer(kind) as (reducer, rank, size):
        slices = [range(*bounds) for bounds in slices_of[rank]]
        value = reducer.allocate(8, torch.float32, CPU).zero_()
        reducer.reduce_scatter(reductions(size)[0], [value], value, slices)


def _refused_and_reduced(kind: str) -> list[float]:
    """A sum after slices that were refused: it also holds every worker until all are connected."""
    with open_reducer(kind) as (reducer, _, size):
        value = reducer.allocate(8, torch.float32, CPU).fill_(1.0)
        with pytest.raises(BadArgument, match="slices must be 2 ranges"):
            reducer.reduce_scatter(reductions(size)[0], [value], value, [range(4), range(5, 8)])
        reducer.reduce(reductions(size)[0], [value], value)
        reducer.synchronize()
        return value.tolist()


@pytest.mark.parametrize("kind", EXACT_WIRES + NATIVE_WIRES)
def test_slices_that_do_not_cover_all_elements_are_refused_and_the_wire_goes_on(kind: str) -> None:
    assert on_workers(2, _refused_and_reduced, kind) == [[2.0] * 8] * 2


def test_workers_with_other_slices_are_refused_by_all_with_the_difference() -> None:
    found = outcomes(2, _scattered_by, "shared", [[[0, 4], [4, 8]], [[0, 5], [5, 8]]])
    assert [outcome.error for outcome in found] == ["Disagreement"] * 2
    assert all("reduce_scatter in slices 0:4 4:8" in outcome.message for outcome in found)


@pytest.mark.parametrize(
    "slices", [[range(4), range(2, 4)], [range(4)], [range(3), range(4, 4)], [range(0, 4, 2), range(4, 4)]]
)
def test_slices_are_checked_for_overlap_number_end_and_step(slices: list[range]) -> None:
    with pytest.raises(BadArgument, match="slices must be 2 ranges"):
        check_slices(slices, 4, 2)
