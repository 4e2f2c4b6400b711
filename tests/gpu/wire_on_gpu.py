"""A script whose workers reduce between GPUs: every kind of sum, or until one of them is killed.

python wire_on_gpu.py MODE SIZE; prints one line for each worker.
"""

import argparse
import faulthandler
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import partial

import torch
from torch.distributed import TCPStore

from lockstep.errors import PeerGone
from lockstep.lanes import Assignment, Branch, Reduction, Root, Tree, reduction
from lockstep.run.start import NCCL_LEFT_TO_US
from lockstep.wire import Wire, in_gpu_memory, over_nccl
from lockstep.wire.cuda.kernels import aligned_slices
from lockstep.wire.cuda.nccl import NcclGroup
from lockstep.wire.exchange import exchange_texts
from lockstep.world import World

DEVICE = torch.device("cuda", 0)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64)
SIZES = (1, 7, 1000, 100_003)
TIMEOUT_S = {"SIGSTOP": 10.0}
HANGS_S = 150.0
"""After this a worker shows where it is, and ends."""


def wanted(tree: Tree, roots: Mapping[Root, torch.Tensor]) -> torch.Tensor:
    """The sum by torch, bracket by bracket."""
    if isinstance(tree, Branch):
        return wanted(tree.left, roots) + wanted(tree.right, roots)
    assert isinstance(tree, Root)
    return roots[tree]


def random_roots(whole: Reduction, size: int, dtype: torch.dtype, exact: bool = True) -> dict[Root, torch.Tensor]:
    """Of any values; or, where the order of additions is not known, of small whole numbers."""
    found = {}
    for rank, number in enumerate(whole.roots_of):
        for index in range(number):
            generator = torch.Generator().manual_seed(1000 * rank + 10 * index + size)
            values = 1000 * torch.randn(size, generator=generator, dtype=torch.float64)
            if not exact:
                values = values.fmod(8).round()
            found[Root(rank, index)] = values.to(dtype).to(DEVICE)
    return found


def is_right(wire: Wire, whole: Reduction, size: int, dtype: torch.dtype, made_here: bool, exact: bool) -> bool:
    """Whether two sums in a row are those of torch; `made_here`: in memory of the wire."""
    roots, rank = random_roots(whole, size, dtype, exact), wire.world.rank
    right = True
    for _ in range(2):
        mine = [roots[Root(rank, index)].clone() for index in range(whole.roots_of[rank])]
        if made_here:
            mine = [wire.reducer.allocate(size, dtype, DEVICE).copy_(root) for root in mine]
        total = mine[0] if mine else wire.reducer.allocate(size, dtype, DEVICE)
        wire.sequence.submit(lambda mine=mine, total=total: wire.reducer.reduce(whole, mine, total)).result()
        right = right and torch.equal(total, wanted(whole.tree, roots))
        wire.reducer.synchronize()
        for tensor in mine or [total]:
            wire.reducer.release(tensor)
    return right


def add(wire: Wire, exact: bool) -> str:
    size = wire.world.size
    trees = [reduction(Assignment.even(lanes, size), tuple(range(lanes))) for lanes in (size, 7)]
    wrong = [
        (str(dtype), number, made_here)
        for dtype in DTYPES
        for whole in trees
        for number in SIZES
        for made_here in (True, False)
        if not is_right(wire, whole, number, dtype, made_here, exact)
    ]
    exchange_texts(wire.transport, "done")  # who closes the wire lets everyone go who is still in a sum
    return f"{wrong}"


def cuts(num_elements: int, size: int, element_bytes: int) -> list[list[range]]:
    """Uneven slices that begin at any address; all for the last worker; another order than ranks; the wire's own."""
    bounds = [0, *(min(num_elements, 1 + 3 * rank**2) for rank in range(size - 1)), num_elements]
    uneven = [range(bounds[rank], bounds[rank + 1]) for rank in range(size)]
    last = [range(0)] * (size - 1) + [range(num_elements)]
    return [uneven, last, uneven[::-1], aligned_slices(num_elements, size, element_bytes)]


def on_queue(wire: Wire, collective: str, *arguments: object) -> None:
    """As the step does it: on the wire's queue, then the host waits for the GPU."""
    wire.sequence.submit(lambda: getattr(wire.reducer, collective)(*arguments)).result()
    wire.reducer.synchronize()


def wrong_slices(wire: Wire, whole: Reduction, number: int, dtype: torch.dtype, made_here: bool) -> list[str]:
    """Which collectives of one reduction, size and dtype are not those of torch, for all ways to cut; twice each."""
    rank, size, found = wire.world.rank, wire.world.size, []
    roots = random_roots(whole, number, dtype)
    everything = wanted(whole.tree, roots)

    def memory() -> torch.Tensor:
        return wire.reducer.allocate(number, dtype, DEVICE) if made_here else torch.empty_like(everything)

    for slices in cuts(number, size, dtype.itemsize):
        own = slice(slices[rank].start, slices[rank].stop)
        total = memory()
        for _ in range(2):
            mine = [memory().copy_(roots[Root(rank, index)]) for index in range(whole.roots_of[rank])]
            on_queue(wire, "reduce_scatter", whole, mine, total, slices)
            if not torch.equal(total[own], everything[own]):
                found.append(f"reduce_scatter {slices}")
            total.fill_(0)[own] = everything[own]
            on_queue(wire, "all_gather", total, slices)
            if not torch.equal(total, everything):
                found.append(f"all_gather {slices}")
    place = wire.reducer.allocate(number, dtype, DEVICE)
    mine = [memory().copy_(roots[Root(rank, index)]) for index in range(whole.roots_of[rank])]
    wire.sequence.submit(lambda: wire.reducer.reduce_unclosed(whole, mine, place)).result()
    if wire.reducer.closing_barrier() or not torch.equal(place, everything):
        found.append("reduce_unclosed")
    return found


def conform(wire: Wire) -> str:
    """The conformance suite of reducers, tests/wire/test_reducer_conformance.py, on GPUs. What is wrong."""
    size = wire.world.size
    dealt = Assignment.explicit([range(rank, 9, size) for rank in range(size)])
    trees = [reduction(Assignment.even(size, size), tuple(range(size))), reduction(dealt, tuple(range(9)))]
    wrong = [
        (str(dtype), number, made_here, found)
        for dtype in (torch.float32, torch.bfloat16, torch.int64)
        for whole in trees
        for number in (1, 7, 1001)
        for made_here in (True, False)
        for found in wrong_slices(wire, whole, number, dtype, made_here)
    ]
    exchange_texts(wire.transport, "done")
    return f"{wrong}"


def lose(wire: Wire, sign: signal.Signals, store: TCPStore) -> str:
    """Worker 1 is killed or stopped in the middle; the others say whom they miss, and stay until both know."""
    whole = reduction(Assignment.even(wire.world.size, wire.world.size), tuple(range(wire.world.size)))
    value = wire.reducer.allocate(1 << 20, torch.float32, DEVICE).zero_()
    for number in range(100_000):
        if wire.world.rank == 1 and number == 50:
            os.kill(os.getpid(), sign)
        try:
            wire.sequence.submit(lambda: wire.reducer.reduce(whole, [value], value)).result()
            wire.reducer.synchronize()
        except PeerGone as gone:
            store.set(f"knows {wire.world.rank}", "")
            store.wait([f"knows {other}" for other in range(wire.world.size) if other != 1], timedelta(seconds=20))
            return f"worker {gone.rank} at {number}: {gone.cause}"
    return "nobody was missed"


def one_sum(wire: Wire) -> str:
    whole = reduction(Assignment.even(wire.world.size, wire.world.size), tuple(range(wire.world.size)))
    value = wire.reducer.allocate(1001, torch.float32, DEVICE).fill_(1.0 + wire.world.rank)
    on_queue(wire, "reduce", whole, [value], value)
    exchange_texts(wire.transport, "done")
    return f"{value.unique().tolist()}"


def lose_while_connecting(victim: int, rank: int, size: int, store: TCPStore, hosts: bool) -> str:
    """The victim is killed when the others make a communicator with it; the others then make one without it."""
    if rank == victim:
        NcclGroup._make = NcclGroup._identifier = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        opened("hosts" if hosts else "nccl", placed(rank, size, 1, hosts), store, 60.0)
    except PeerGone as gone:
        said = f"worker {gone.rank}"
    others = [other for other in range(size) if other != victim]
    with opened("nccl", placed(others.index(rank), size - 1, 2, hosts), store, 60.0) as wire:
        return f"{said}, then {one_sum(wire)}"


def placed(rank: int, size: int, generation: int, hosts: bool) -> World:
    local = (0, 1) if hosts else (rank, size)
    return World(rank, size, *local, generation)


def opened(kind: str, world: World, store: TCPStore, timeout_s: float, *, exact: bool = True) -> Wire:
    if kind == "gpu":
        return in_gpu_memory(world, store, timeout_s, DEVICE)
    return over_nccl(world, store, timeout_s, DEVICE, exact=exact, host=os.environ["NCCL_HOSTID"])


def work(rank: int, arguments: argparse.Namespace, port: int) -> None:
    # NCCL takes one GPU of one host for one worker: each worker is a host of its own to it, and they talk over sockets.
    os.environ |= {"NCCL_HOSTID": f"test-{rank}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= NCCL_LEFT_TO_US
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    torch.cuda.set_device(0)
    store = TCPStore("127.0.0.1", port, is_master=False)
    mode, size, hosts = arguments.mode, arguments.size, arguments.wire == "hosts"
    if mode.startswith("connecting"):
        report = lose_while_connecting(int(mode[-1]), rank, size, store, hosts)
    else:
        world, exact = placed(rank, size, 1, hosts), not arguments.native
        with opened(arguments.wire, world, store, TIMEOUT_S.get(mode, 60.0), exact=exact) as wire:
            modes = {"add": partial(add, exact=exact), "conform": conform}
            report = modes[mode](wire) if mode in modes else lose(wire, signal.Signals[mode], store)
    sys.stdout.write(f"{rank}: {report}\n")  # as a whole, beside those of others
    sys.stdout.flush()
    os._exit(0)  # a thread that was left behind in NCCL is not waited for


def main(arguments: argparse.Namespace) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(rank, arguments, store.port)) for rank in range(arguments.size)]
    for worker in workers:
        worker.start()
    mode = arguments.mode
    lost = {"SIGKILL": 1, "SIGSTOP": 1}.get(mode, int(mode[-1]) if mode.startswith("connecting") else None)
    victim = None if lost is None else workers[lost]
    others = [worker for worker in workers if worker is not victim]
    for worker in others:
        worker.join()
    if victim is not None:
        victim.kill()
        victim.join()
    if any(worker.exitcode for worker in others):
        sys.exit("a worker failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "mode", choices=("add", "conform", "SIGKILL", "SIGSTOP", *(f"connecting-{r}" for r in range(4)))
    )
    parser.add_argument("size", type=int)
    parser.add_argument("--wire", choices=("gpu", "nccl", "hosts"), default="gpu", help="hosts: NCCL, messages by Gloo")
    parser.add_argument("--native", action="store_true", help="NCCL's own all-reduce, as exact=False has it")
    main(parser.parse_args())
