"""What goes wrong is named on every rank, and what can go on goes on."""

import atexit
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from groups import joined, open_store, place
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import on_workers, outcomes

from lockstep.errors import Disagreement, Misuse, PeerGone
from lockstep.torch_backend.group import open_among
from lockstep.torch_backend.work import OperationQueue


def _operation(rank: int) -> None:
    dist.all_reduce(torch.ones(3)) if rank == 0 else dist.broadcast(torch.ones(3), 0)


def _dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(3, dtype=torch.float32 if rank == 0 else torch.int32))


def _size(rank: int) -> None:
    dist.all_reduce(torch.ones(100_000 + rank))


def _reduction(rank: int) -> None:
    dist.all_reduce(torch.ones(3), dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX)


def _root(rank: int) -> None:
    dist.broadcast(torch.ones(3), rank)


def _parts(rank: int) -> None:
    dist.all_to_all_single(torch.zeros(4), torch.ones(4), [2, 2], [2, 2] if rank == 0 else [3, 1])


def _after_disagreeing(job: Callable[[int], None]) -> tuple[str, float]:
    with joined() as group:
        with pytest.raises(Disagreement) as error:
            job(group.rank)
        dist.all_reduce(value := torch.full((2,), 1.0 + group.rank))
        return str(error.value), value[0].item()


@pytest.mark.parametrize(
    ("job", "first"),
    [
        (_operation, "the operation: worker 0 has all_reduce, worker 1 has broadcast."),
        (_dtype, "the dtype of all_reduce: worker 0 has float32, worker 1 has int32."),
        (_size, "the number of elements of all_reduce: worker 0 has 100000, worker 1 has 100001."),
        (_reduction, "the reduction of all_reduce: worker 0 has SUM, worker 1 has MAX."),
        (_root, "the root of broadcast: worker 0 has 0, worker 1 has 1."),
        (
            _parts,
            "the number of elements that the first gives to the second in all_to_all: worker 1 has 3, worker 0 has 2.",
        ),
    ],
)
def test_ranks_that_ask_for_different_things_name_the_first_and_go_on(job: Callable[[int], None], first: str) -> None:
    found = on_workers(2, _after_disagreeing, job)
    assert found[0][0].startswith(f"workers disagree on {first}")
    assert found[1][0].startswith("workers disagree on ")
    assert [value for _, value in found] == [3, 3]


def _nothing_was_touched() -> list[float]:
    with joined() as group:
        tensor = torch.full((3 + group.rank,), 5.0)
        with pytest.raises(Disagreement):
            dist.all_reduce(tensor)
        return tensor.tolist()


def test_a_disagreement_leaves_the_tensors_as_they_were() -> None:
    assert on_workers(2, _nothing_was_touched) == [[5] * 3, [5] * 4]


def _in_a_subgroup() -> str:
    with joined() as group:
        pair = dist.new_group([0, 2])
        if group.rank == 1:
            return ""
        with pytest.raises(Disagreement) as error:
            dist.all_reduce(torch.ones(1 + group.rank), group=pair)
        return str(error.value)


def test_members_of_a_subgroup_are_named_by_their_global_ranks() -> None:
    result = on_workers(3, _in_a_subgroup)
    assert "worker 0 has 1, worker 2 has 3" in result[0]


def _die(what: str) -> None:
    with joined() as group:
        dist.all_reduce(torch.ones(2))
        model = DDP(nn.Linear(4, 4)) if what == "backward" else None
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if model is not None:
            model(torch.ones(1, 4)).sum().backward()
        elif what == "async":
            dist.all_reduce(torch.ones(2), async_op=True).wait()
        elif what == "future":
            dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()
        elif what == "message":
            dist.recv(torch.ones(2), 1)
        else:
            dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize("what", ["plain", "async", "message"])
def test_a_killed_rank_is_named_to_whoever_waits_for_it(what: str) -> None:
    first, _, third = outcomes(3, _die, "plain") if what == "plain" else (*outcomes(2, _die, what), None)
    for survivor in (first, third):
        if survivor is not None:
            assert survivor.error == "RankGone"
            assert survivor.message.startswith("worker 1 stopped answering: ")


@pytest.mark.parametrize("what", ["backward", "future"])
def test_a_killed_rank_is_named_through_torchs_own_cpp_code(what: str) -> None:
    survivor, _ = outcomes(2, _die, what)
    assert survivor.error == "RuntimeError"
    assert "RankGone: worker 1 stopped answering: " in survivor.message


def _after_a_death() -> list[str]:
    with joined() as group:
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        result = []
        for _ in range(2):
            with pytest.raises(RuntimeError) as error:
                dist.all_reduce(torch.ones(2))
            assert isinstance(error.value, PeerGone)
            assert isinstance(error.value, dist.DistBackendError)
            result.append(str(error.value))
        return result


def test_after_a_death_every_operation_fails_with_the_same_sentence() -> None:
    result = outcomes(2, _after_a_death)[0].value
    assert result[0] == result[1]


def test_an_interrupt_is_raised_once_and_later_operations_say_that_it_ended_the_group() -> None:
    def press_control_c() -> None:
        raise KeyboardInterrupt

    order = OperationQueue(fail_group=lambda error: error)
    with pytest.raises(KeyboardInterrupt):
        order.submit(press_control_c, now=True).result()
    with pytest.raises(Misuse, match=r"was interrupted \(KeyboardInterrupt\), which ended the group"):
        order.submit(lambda: None, now=True).result()
    order.close()


def _silent() -> str:
    with joined(timeout_s=0.5) as group:
        if group.rank == 1:
            dist.distributed_c10d._get_default_store().get("told")  # alive, but elsewhere
            return ""
        with pytest.raises(RuntimeError) as error:
            dist.barrier()
        dist.distributed_c10d._get_default_store().set("told", "1")
        return str(error.value)


def test_a_rank_that_is_alive_and_silent_is_named_when_the_time_is_over() -> None:
    assert outcomes(2, _silent)[0].value == "worker 1 stopped answering: it has been silent for 0.5 s"


def _asynchronous() -> None:
    with joined() as group:
        if group.rank == 0:
            tensors = [torch.full((50_000,), float(number)) for number in range(20)]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            assert not works[-1].is_completed()  # nobody has met it yet
            with pytest.raises(TimeoutError):
                works[-1].wait(timedelta(seconds=0.01))
            dist.distributed_c10d._get_default_store().set("go", "1")
        else:
            dist.distributed_c10d._get_default_store().get("go")
            tensors = [torch.full((50_000,), float(number)) for number in range(20)]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        last = torch.ones(1)
        dist.all_reduce(last)  # waits for its turn behind the others
        assert works[-1].is_completed()
        assert works[-1].is_success()
        for number, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
            assert work.wait()
            assert work.result()[0] is tensor
            assert torch.equal(work.get_future().wait()[0], torch.full((50_000,), 2.0 * number))


def test_asynchronous_operations_run_in_order_beside_the_caller() -> None:
    on_workers(2, _asynchronous)


def _what_is_held() -> tuple[int, list[str], int]:
    process = psutil.Process()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("lockstep")]
    return process.num_fds(), threads, sum("memfd:lockstep" in region.path for region in process.memory_maps())


def _open_and_close() -> None:
    store = open_store()
    rank, size = place()

    def once() -> None:
        dist.init_process_group("lockstep", store=store, rank=rank, world_size=size)
        dist.all_reduce(torch.ones(100_000), async_op=True).wait()
        work = dist.isend(torch.ones(3_000_000), 1) if rank == 0 else dist.irecv(torch.ones(3_000_000), 0)
        dist.barrier()
        work.wait()
        dist.destroy_process_group()

    inherited = _what_is_held()[1:]  # this process was forked
    once()  # what torch and the compiler keep for ever
    before = _what_is_held()
    for _ in range(3):
        once()
    assert _what_is_held() == before
    assert before[1:] == inherited


def test_destroying_a_group_frees_threads_sockets_and_memory_and_it_can_be_opened_again() -> None:
    on_workers(2, _open_and_close)


def _forked_process_ends() -> float:
    with joined():
        dist.all_reduce(torch.ones(1))
        if (child := os.fork()) == 0:
            try:
                atexit._run_exitfuncs()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        dist.all_reduce(value := torch.ones(1))
        other = 1 - dist.get_rank()
        work = dist.isend(value, other)
        dist.recv(received := torch.zeros(1), other)
        work.wait()
        return received.item()


def test_a_forked_process_that_ends_leaves_the_group_alone() -> None:
    assert on_workers(2, _forked_process_ends) == [2, 2]


def _after_destroying() -> str:
    with joined():
        group = dist.group.WORLD
        dist.barrier()
    with pytest.raises(RuntimeError, match="destroyed") as error:
        group.barrier()
    return str(error.value)


def test_a_group_that_was_destroyed_says_so() -> None:
    assert "make a new one" in on_workers(2, _after_destroying)[0]


def _apart() -> list[str]:
    rank, size = place()

    def between_two_hosts(asked, options):
        return open_among(((0,), (1,)), rank, list(range(size)), asked.store, asked.timeout)

    dist.Backend.register_backend("apart", between_two_hosts, extended_api=True, devices=["cpu"])
    with joined("apart"):
        dist.all_reduce(value := torch.ones(2))
        kind = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
        return [type(dist.group.WORLD).__name__, kind, str(value.tolist())]


def test_between_hosts_everything_is_handed_to_gloo() -> None:
    assert on_workers(2, _apart) == [["ProcessGroup", "ProcessGroupGloo", "[2.0, 2.0]"]] * 2
