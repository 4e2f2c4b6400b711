"""The reducer by collectives between real ranks. NCCL needs a GPU for each; here Gloo's collectives stand in for them.

What is tested is all but NCCL itself: who is given which slice, the padding, the order of additions.
"""

import threading
from contextlib import closing
from typing import Any

import pytest
import torch
from sums_by_hand import CPU, Done, PlayedGpu, by_hand, random_roots
from workers import on_workers

from lockstep.elastic.rendezvous import open_store
from lockstep.errors import BadArgument, BadEnvironment, PeerGone
from lockstep.lanes import Assignment, Root, reduction
from lockstep.settings.environment import find_place, process_environment
from lockstep.wire.cuda.gpu import Gpu, GpuWait
from lockstep.wire.cuda.slices import SliceReducer
from lockstep.wire.network.gloo import GlooTransport
from lockstep.wire.open import refuse_shared
from lockstep.wire.schedules.executor import Executor
from lockstep.wire.transport import InProcess
from lockstep.world import World

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
SIZES = (1, 7, 64, 1001)


class GlooGroup:
    """A Group over Gloo, on the CPU."""

    gpu: Gpu = PlayedGpu(CPU)

    def __init__(self, transport: GlooTransport) -> None:
        self.world: World = transport.world
        self._group: Any = transport._group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._group.allreduce([tensor]).wait()

    def all_to_all(self, out: torch.Tensor, given: torch.Tensor, out_sizes: list[int], sizes: list[int]) -> None:
        self._group.alltoall_base(_bytes(out), _bytes(given), *(_in_bytes(out, s) for s in (out_sizes, sizes))).wait()

    def all_gather(self, out: torch.Tensor, given: torch.Tensor) -> None:
        self._group._allgather_base(_bytes(out), _bytes(given).clone()).wait()

    def abort(self) -> None:
        pass


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _in_bytes(like: torch.Tensor, sizes: list[int]) -> list[int]:
    return [size * like.element_size() for size in sizes]


def opened(exact: bool) -> tuple[GlooTransport, SliceReducer]:
    place = find_place(process_environment())
    transport = GlooTransport(place.world, open_store(place, 20.0), 20.0)
    return transport, SliceReducer(GlooGroup(transport), GpuWait(lambda: None), Executor(transport), exact=exact)


def wrong_sums(lanes: list[int], present: list[int] | None = None) -> list[str]:
    """Which sums are not those by hand, of all dtypes and sizes, in memory of the reducer and in other memory."""
    transport, reducer = opened(exact=True)
    wrong = []
    with closing(transport):
        world = transport.world
        for num_lanes in lanes:
            there = tuple(range(num_lanes)) if present is None else tuple(present)
            whole = reduction(Assignment.even(num_lanes, world.size), there)
            for dtype in DTYPES:
                for size in SIZES:
                    for made_here in (True, False):
                        roots = random_roots(whole, size, dtype)
                        wanted = by_hand(whole.tree, roots)
                        mine = [roots[Root(world.rank, index)].clone() for index in range(whole.roots_of[world.rank])]
                        if made_here:
                            mine = [reducer.allocate(size, dtype, CPU).copy_(root) for root in mine]
                        total = mine[0] if mine else torch.empty(size, dtype=dtype)
                        reducer.reduce(whole, mine, total)
                        reducer.synchronize()
                        if not torch.equal(total, wanted):
                            wrong.append(f"{num_lanes} lanes, {dtype}, {size} elements, {made_here}")
    return wrong


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_sums_by_collectives_have_the_brackets_of_the_tree(num_workers: int) -> None:
    for wrong in on_workers(num_workers, wrong_sums, [num_workers, 7, 8]):
        assert wrong == []


def test_a_worker_without_lanes_is_given_the_sum_too() -> None:
    for wrong in on_workers(3, wrong_sums, [6], [0, 1, 5]):
        assert wrong == []


def handed_over() -> bool:
    transport, reducer = opened(exact=False)
    with closing(transport):
        world = transport.world
        whole = reduction(Assignment.even(2 * world.size, world.size), tuple(range(2 * world.size)))
        mine = [torch.full((9,), 1.0 + world.rank) for _ in range(whole.roots_of[world.rank])]
        total = torch.full((9,), float("nan"))
        reducer.reduce(whole, mine, total)
        wanted = sum((1.0 + rank) * number for rank, number in enumerate(whole.roots_of))
        return torch.equal(total, torch.full((9,), wanted))


def test_without_exact_the_groups_own_sum_is_taken() -> None:
    assert on_workers(3, handed_over) == [True, True, True]


def test_what_is_on_another_device_goes_to_the_cpu_reducer() -> None:
    class Noted(Executor):
        def __init__(self) -> None:
            self.reduced = 0

        def reduce(self, *_: Any) -> None:
            self.reduced += 1

    class OnMeta(GlooGroup):
        gpu = PlayedGpu(torch.device("meta"))

        def __init__(self) -> None:
            self.world = World()

    cpu_reducer = Noted()
    whole = reduction(Assignment.even(1, 1), (0,))
    value = torch.ones(3)
    SliceReducer(OnMeta(), GpuWait(lambda: None), cpu_reducer).reduce(whole, [value], value)
    assert cpu_reducer.reduced == 1


def test_who_waits_for_its_gpu_is_told_who_is_gone() -> None:
    freed = []
    waiting = GpuWait(lambda: freed.append(True))
    waiting.wait(Done())
    waiting.fail(PeerGone(2, "its process has ended"))
    waiting.fail(PeerGone(1, "later"))
    assert freed
    with pytest.raises(PeerGone) as raised:
        waiting.wait(Done())
    assert raised.value.rank == 2


def test_buffers_are_given_back_only_when_the_gpu_has_done_what_was_queued_behind_an_abort() -> None:
    done: list[str] = []

    class Noted(PlayedGpu):
        def finish(self) -> None:
            done.append("the GPU has done all")

    class Aborted(GlooGroup):
        gpu = Noted(CPU)

        def __init__(self) -> None:
            self.world = World()

        def abort(self) -> None:
            done.append("abort")

    SliceReducer(Aborted(), GpuWait(lambda: None), Executor(InProcess(World()))).close()
    assert done == ["abort", "the GPU has done all"]


@pytest.mark.parametrize("later_s", [0.0, 0.1], ids=["known", "known a moment later"])
def test_a_collective_that_was_aborted_names_the_worker_whose_loss_aborted_it(later_s: float) -> None:
    """NCCL may notice a loss before the connections do, and does not say whose it is."""

    class Aborted(GlooGroup):
        def __init__(self) -> None:
            self.world = World(0, 3)

        def all_to_all(self, *_: Any) -> None:
            raise PeerGone(1, "the connection was closed here")

    waiting = GpuWait(lambda: None)
    naming = threading.Timer(later_s, waiting.fail, [PeerGone(2, "its process has ended")])
    naming.start()
    if not later_s:
        naming.join()
    reducer = SliceReducer(Aborted(), waiting, Executor(InProcess(World())))
    value = torch.ones(3)
    with pytest.raises(PeerGone) as raised:
        reducer.reduce(reduction(Assignment.even(3, 3), (0, 1, 2)), [value], value)
    naming.join()
    assert raised.value.rank == 2


def test_a_dtype_that_nccl_does_not_add_is_refused_by_name() -> None:
    class Unused(GlooGroup):
        def __init__(self) -> None:
            self.world = World()

    flags = torch.ones(3, dtype=torch.bool)
    reducer = SliceReducer(Unused(), GpuWait(lambda: None), Executor(InProcess(World())), exact=False)
    with pytest.raises(BadArgument, match="not bool"):
        reducer.reduce(reduction(Assignment.even(1, 1), (0,)), [flags], flags)


def test_workers_with_one_gpu_are_refused_by_nccl_and_one_visible_gpu_each_is_not() -> None:
    refuse_shared(["node GPU-a", "node GPU-b", "other GPU-a"])
    with pytest.raises(BadEnvironment, match="workers 0, 2 have the same one"):
        refuse_shared(["node GPU-a", "node GPU-b", "node GPU-a"])
