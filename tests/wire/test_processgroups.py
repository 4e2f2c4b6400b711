"""The backends of torch.distributed: what is handed over to them, and how those that are missing are told."""

import os
import re
import signal
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from workers import on_workers, outcomes

import lockstep
from lockstep.elastic.rendezvous import open_store
from lockstep.errors import BadArgument, BadEnvironment, PeerGone, WireError
from lockstep.lanes import Assignment, reduction
from lockstep.settings.environment import find_place
from lockstep.wire.cuda.nccl import check_available
from lockstep.wire.exchange import exchange
from lockstep.wire.network.gloo import GlooTransport, means_lost_peer
from lockstep.wire.network.native import NativeAllReduce
from lockstep.wire.schedules.executor import Executor


def open_gloo() -> GlooTransport:
    place = find_place(os.environ)
    return GlooTransport(place.world, open_store(place, 20.0), 20.0)


def _hand_over(lanes_of: list[list[int]], dtype: str, in_place: bool) -> list[Any]:
    """How far the handed-over sum is from the exact one at most, and the sum itself."""
    with closing(open_gloo()) as transport:
        rank = transport.world.rank
        whole = reduction(Assignment.explicit(lanes_of), tuple(range(sum(map(len, lanes_of)))))
        chance = torch.Generator().manual_seed(rank)
        roots = [torch.randn(1003, generator=chance).to(getattr(torch, dtype)) for _ in range(whole.roots_of[rank])]
        exact = torch.empty(1003, dtype=getattr(torch, dtype))
        Executor(transport).reduce(whole, [root.clone() for root in roots], exact)
        total = roots[0] if in_place and roots else torch.full_like(exact, torch.nan)
        NativeAllReduce(transport).reduce(whole, roots, total)
        return [float((total - exact).abs().max()), torch.view_as_real(total + 0j).tolist()]


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "elsewhere"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_sum_that_is_handed_over_is_the_exact_one_up_to_rounding(dtype: str, in_place: bool) -> None:
    """Worker 1 has three roots, worker 2 none."""
    for difference, _ in on_workers(3, _hand_over, [[1, 3], [0, 2, 4], []], dtype, in_place):
        assert difference < 1e-5


def test_a_sum_that_is_handed_over_has_the_same_bits_on_every_worker() -> None:
    found = [total for _, total in on_workers(3, _hand_over, [[0], [1], [2]], "float32", True)]
    assert found == [found[0]] * 3


def _hand_over_nothing() -> list[float]:
    with closing(open_gloo()) as transport:
        nothing, something = torch.empty(0), torch.ones(1)
        whole = reduction(Assignment.even(2, 2), (0, 1))
        NativeAllReduce(transport).reduce(whole, [nothing], nothing)
        NativeAllReduce(transport).reduce(whole, [something], something)
        return list(something.tolist())


def test_an_empty_bucket_is_handed_over_without_a_word() -> None:
    assert on_workers(2, _hand_over_nothing) == [[2.0]] * 2


def _hand_over_bools() -> None:
    with closing(open_gloo()) as transport:
        flags = torch.tensor([True])
        NativeAllReduce(transport).reduce(reduction(Assignment.even(2, 2), (0, 1)), [flags], flags)


def test_a_dtype_that_backends_add_wrongly_is_refused() -> None:
    found = outcomes(2, _hand_over_bools)
    assert [outcome.error for outcome in found] == [BadArgument.__name__] * 2
    assert "not bool" in found[0].message


def _lose_a_peer_in_a_handover() -> list[Any]:
    with closing(open_gloo()) as transport:
        whole = reduction(Assignment.even(3, 3), (0, 1, 2))
        root = torch.ones(100_000)
        NativeAllReduce(transport).reduce(whole, [root], root)
        if transport.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerGone) as gone:
            NativeAllReduce(transport).reduce(whole, [root], root)
        return [gone.value.rank]


def test_a_peer_killed_during_a_handover_is_named_by_the_survivors() -> None:
    found = outcomes(3, _lose_a_peer_in_a_handover)
    assert [found[0].value, found[2].value] == [[1], [1]]


def _refused_by_gloo() -> list[Any]:
    """An all-reduce that Gloo does not know, and what can be done after it."""
    with closing(open_gloo()) as transport:
        with pytest.raises(WireError) as refused:
            transport.all_reduce(torch.ones(3, dtype=torch.int16))
        numbers = torch.ones(3)
        transport.all_reduce(numbers)
        return [str(refused.value), numbers.tolist()]


def test_what_a_backend_refuses_is_no_lost_worker() -> None:
    for result, numbers in on_workers(2, _refused_by_gloo):
        assert re.match(
            r"the all-reduce of 3 elements of int16 between worker \d and \d by Gloo failed: Invalid scalar type\. "
            r"No worker is gone, and trying again would fail alike: the run ends\.",
            result,
        )
        assert numbers == [2.0] * 3


def _train_with_a_refusal() -> list[int]:
    """The second step hands Gloo something that it does not add.

    A worker that was refused ends. One that had not asked yet finds it lost, and does the step again with both lanes.
    """
    steps: list[int] = []
    with lockstep.start(lanes=2, exact=False, wire="gloo", noise_every=0) as run:
        model = torch.nn.Linear(4, 2)
        run.replicate(model)
        transport: Any = run.guard.generation.wire.transport
        own = transport.all_reduce
        transport.all_reduce = lambda total: own(total.to(torch.int16) if run.step == 1 else total)
        for _ in range(4):
            for x in run.lanes(torch.ones(4, 4)):
                steps.append(run.step)
                if steps.count(1) > 3:
                    raise AssertionError(f"the step is done again and again: {steps}")
                model(x).sum().backward()
    return steps


def test_a_refusal_ends_the_run_the_first_time() -> None:
    found = outcomes(2, _train_with_a_refusal)
    assert {outcome.error for outcome in found} <= {"WireError", "WorkerLost", None}
    assert any("Invalid scalar type" in outcome.message for outcome in found)


GONE = [
    "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:36269. This is typically caused by",
    "[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:19342: Connection reset by peer. This is typically",
    "[/gloo/transport/tcp/pair.cc:300] writev [10.0.0.1]:19342: Broken pipe",
    "[/gloo/transport/tcp/pair.cc:200] connect [10.0.0.1]:19342: Connection refused",
    "[/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.1]:19342: Connection timed out",
    "[/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.1]:19342: No route to host",
    "[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",
    "Application timeout caused pair closure",
    "Socket closed [127.0.0.1]:3",
    "NCCL error in: NCCLUtils.hpp:275, remote process exited or there was a network error, NCCL version 2.27.3\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "NCCL error in: NCCLUtils.cpp:93, unhandled system error, NCCL version 2.27.3\nncclSystemError: System call (e.g. "
    "socket, malloc) or external library call failed.\nLast error:\nsocketProgress: Connection closed by remote peer",
    "NCCL communicator was aborted on rank 0.",
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)",
]
REFUSED = [
    "Invalid scalar type",
    "[enforce fail at /gloo/allreduce.cc:140] elements > 0",
    "Too many open files",
    "NCCL error in: NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.3\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected",
    "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure 2 'out of memory'",
    "CUDA error: an illegal memory access was encountered",
]


def test_which_words_tell_of_a_loss() -> None:
    assert [words for words in GONE if not means_lost_peer(RuntimeError(words))] == []
    assert [words for words in REFUSED if means_lost_peer(RuntimeError(words))] == []


def _wait_twice() -> float:
    with closing(open_gloo()) as transport:
        peer = 1 - transport.world.rank
        place = torch.empty(1)
        arrival = transport.receive(place, peer, 4)
        transport.send(torch.ones(1), peer, 4).wait()
        arrival.wait()
        arrival.wait()
        exchange(transport, torch.zeros(1, dtype=torch.uint8))
        return place.item()


def test_a_message_may_be_waited_for_again() -> None:
    assert on_workers(2, _wait_twice) == [1.0, 1.0]


def _wait_in_a_chain(awaited_by: list[int]) -> int:
    """Each waits for one other, and leaves when that one is gone; who waits for itself is killed."""
    with closing(open_gloo()) as transport:
        rank = transport.world.rank
        exchange(transport, torch.zeros(1, dtype=torch.uint8))
        if awaited_by[rank] == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerGone) as gone:
            transport.receive(torch.empty(1), awaited_by[rank], 4).wait()
        return gone.value.rank


@pytest.mark.parametrize("awaited_by", [[2, 3, 1, 3], [3, 0, 1, 3], [0, 0, 1, 2]], ids=str)
def test_in_a_chain_of_waits_all_name_the_one_that_was_gone_first(awaited_by: list[int]) -> None:
    """Worker 0, which holds the store, is the last of the chain, the first, or the one that dies."""
    (killed,) = [rank for rank, awaited in enumerate(awaited_by) if rank == awaited]
    found = outcomes(4, _wait_in_a_chain, awaited_by)
    assert [outcome.value for rank, outcome in enumerate(found) if rank != killed] == [killed] * 3


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_nccl_that_torch_does_not_have_is_told() -> None:
    with pytest.raises(BadEnvironment, match="built without NCCL"):
        check_available()


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_nccl_without_a_gpu_is_told() -> None:
    with pytest.raises(BadEnvironment, match="needs a GPU"):
        check_available()
