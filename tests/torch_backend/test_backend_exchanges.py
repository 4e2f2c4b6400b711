"""Collectives that move tensors, compared with Gloo; messages; and tensors of every kind."""

import random

import pytest
import torch
import torch.distributed as dist
from groups import joined
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import AllgatherOptions
from workers import on_workers

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float64)
SIZES = ((1,), (3, 5), (150_000,))


def sample(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) * (rank + 1) % 251).view(shape).to(dtype)


def _like_gloo() -> int:
    """Gloo carries the same numbers as float64, the one dtype that all its collectives know."""
    compared = 0
    with joined() as group:
        gloo = dist.new_group(backend="gloo")
        for shape in SIZES:
            for collective in (_broadcast, _all_gather, _all_gather_single, _gather, _scatter, _all_to_all):
                theirs = collective(group.rank, group.size, shape, torch.float64, gloo)
                for dtype in DTYPES:
                    ours = collective(group.rank, group.size, shape, dtype, None)
                    expected = [tensor.to(dtype) for tensor in theirs]
                    assert all(map(torch.equal, ours, expected)), (collective.__name__, dtype, shape)
                    compared += len(ours)
    return compared


def _broadcast(rank, size, shape, dtype, group):
    tensor = sample(rank, shape, dtype)
    dist.broadcast(tensor, src=size - 1, group=group)
    return [tensor]


def _all_gather(rank, size, shape, dtype, group):
    tensors = [torch.zeros(shape, dtype=dtype) for _ in range(size)]
    dist.all_gather(tensors, sample(rank, shape, dtype), group=group)
    return tensors


def _all_gather_single(rank, size, shape, dtype, group):
    tensor = torch.zeros((size * shape[0], *shape[1:]), dtype=dtype)
    dist.all_gather_into_tensor(tensor, sample(rank, shape, dtype), group=group)
    return [tensor]


def _gather(rank, size, shape, dtype, group):
    tensors = [torch.zeros(shape, dtype=dtype) for _ in range(size)] if rank == 1 else None
    dist.gather(sample(rank, shape, dtype), tensors, dst=1, group=group)
    return tensors or []


def _scatter(rank, size, shape, dtype, group):
    tensor = torch.zeros(shape, dtype=dtype)
    tensors = [sample(part, shape, dtype) for part in range(size)] if rank == 0 else None
    dist.scatter(tensor, tensors, src=0, group=group)
    return [tensor]


def _all_to_all(rank, size, shape, dtype, group):
    """Uneven: rank r gives part p a number of rows that depends on both."""
    width = shape[-1] if len(shape) > 1 else 1 + shape[0] // 10
    sent, received = [rank + part for part in range(size)], [part + rank for part in range(size)]
    tensor = sample(rank, (sum(sent), width), dtype)
    target = torch.zeros(sum(received), width, dtype=dtype)
    dist.all_to_all_single(target, tensor, received, sent, group=group)
    return [target]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_every_exchange_gives_what_gloo_gives(num_workers: int) -> None:
    assert all(compared > 100 for compared in on_workers(num_workers, _like_gloo))


def _lists_and_coalesced() -> None:
    with joined() as group:
        given = [torch.full((part + 1, 2), 10 * group.rank + part) for part in range(group.size)]
        taken = [torch.zeros(group.rank + 1, 2, dtype=torch.int64) for _ in range(group.size)]
        dist.all_to_all(taken, given)
        assert [tensor[0, 0].item() for tensor in taken] == [10 * rank + group.rank for rank in range(group.size)]

        inputs = [torch.full((2,), group.rank), torch.full((3,), float(group.rank))]
        outputs = [torch.zeros(2 * group.size, dtype=torch.int64), torch.zeros(3 * group.size)]
        dist.group.WORLD.allgather_into_tensor_coalesced(outputs, inputs, AllgatherOptions()).wait()
        for output, length in zip(outputs, (2, 3), strict=True):
            assert output.view(group.size, length)[:, 0].tolist() == list(range(group.size))

        uneven = [torch.zeros(rank + 1) for rank in range(group.size)]
        dist.all_gather(uneven, torch.full((group.rank + 1,), float(group.rank)))
        assert [tensor.tolist() for tensor in uneven] == [[float(rank)] * (rank + 1) for rank in range(group.size)]

        with dist._coalescing_manager():
            for _ in range(3):
                dist.all_reduce(inputs[0])


def test_lists_uneven_lists_and_coalesced_exchanges_bring_every_part_to_its_place() -> None:
    on_workers(3, _lists_and_coalesced)


def _many_tensors() -> None:
    with joined() as group:
        inputs = [torch.tensor([group.rank, number]) for number in range(2500)]
        outputs = [torch.zeros(2 * group.size, dtype=torch.int64) for _ in inputs]
        dist.group.WORLD.allgather_into_tensor_coalesced(outputs, inputs, AllgatherOptions()).wait()
        assert outputs[2400].tolist() == [0, 2400, 1, 2400]


def test_a_list_of_thousands_of_tensors_is_gathered() -> None:
    on_workers(2, _many_tensors)


def _empty() -> None:
    with joined() as group:
        for collective in (_broadcast, _all_gather, _all_gather_single, _gather, _scatter, _all_to_all):
            assert all(tensor.numel() == 0 for tensor in collective(group.rank, group.size, (0, 0), torch.int32, None))
        dist.all_reduce(torch.empty(0))
        dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0))


def test_tensors_without_elements_take_part() -> None:
    on_workers(2, _empty)


def _long() -> None:
    num_elements = 1_500_000  # 12 MB: three chunks
    with joined() as group:
        tensor = torch.arange(num_elements) * (group.rank == 1)
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor, torch.arange(num_elements))
        everyone = torch.zeros(group.size * num_elements, dtype=torch.int64)
        dist.all_gather_into_tensor(everyone, tensor + group.rank)
        for rank, part in enumerate(everyone.split(num_elements)):
            assert torch.equal(part, tensor + rank)
        back = torch.zeros_like(everyone)
        dist.all_to_all_single(back, everyone + group.rank)
        for rank, part in enumerate(back.split(num_elements)):
            assert torch.equal(part, tensor + group.rank + rank)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_exchanges_of_several_chunks_are_whole(num_workers: int) -> None:
    on_workers(num_workers, _long)


def _layouts() -> None:
    with joined() as group:
        base = torch.zeros(6, 8)
        strided = base[::2, 1::2]
        strided += group.rank + 1
        dist.all_reduce(strided)
        assert torch.equal(base[::2, 1::2], torch.full((3, 4), 3.0))
        assert base.sum() == 3 * 12  # nothing else was touched
        transposed = (torch.arange(12.0) * (group.rank == 0)).view(3, 4).t()
        dist.broadcast(transposed, 0)
        assert torch.equal(transposed, torch.arange(12.0).view(3, 4).t())
        parameter = torch.nn.Parameter(torch.full((2,), float(group.rank)))
        dist.broadcast(parameter.data, 1)
        dist.all_reduce(parameter.detach())
        weight = torch.full((2,), 1.0, requires_grad=True)
        dist.group.WORLD.allreduce([weight], dist.AllreduceOptions()).wait()
        assert weight.tolist() == [2, 2]
        scalar = torch.tensor(float(group.rank))
        dist.all_reduce(scalar)
        assert scalar.item() == 1
        conjugate = torch.complex(torch.ones(3), torch.full((3,), float(group.rank))).conj()
        dist.group.WORLD.allreduce([conjugate], dist.AllreduceOptions()).wait()
        assert torch.equal(conjugate.resolve_conj(), torch.complex(torch.full((3,), 2.0), torch.full((3,), -1.0)))
        sparse = torch.sparse_coo_tensor([[group.rank]], [1.0], (4,))
        dist.all_reduce(sparse)
        assert sparse.to_dense().tolist() == [1, 1, 0, 0]
        assert not sparse._values().is_inference()


def test_tensors_that_are_strided_tracked_scalar_conjugate_or_sparse_are_reduced_in_place() -> None:
    on_workers(2, _layouts)


def _all_to_all_in_place() -> None:
    with joined() as group:
        num_elements = 700_000  # to each member; two of them are more than a chunk
        tensor = torch.cat([torch.full((num_elements,), 10.0 * group.rank + to) for to in range(group.size)])
        dist.all_to_all_single(tensor, tensor)
        for source, part in enumerate(tensor.split(num_elements)):
            assert torch.equal(part, torch.full((num_elements,), 10.0 * source + group.rank))


def test_a_long_tensor_is_exchanged_with_all_in_place() -> None:
    on_workers(3, _all_to_all_in_place)


def _inference() -> None:
    with joined():
        with torch.inference_mode():
            tensors = [torch.ones(3), torch.ones(100_000)]  # the second makes the group allocate memory
            for tensor in tensors:
                dist.all_reduce(tensor)
                dist.all_reduce(tensor, async_op=True).wait()
        dist.all_reduce(outside := torch.ones(100_000))
        dist.all_reduce(tensors[0])
        assert [float(tensor.max()) for tensor in (*tensors, outside)] == [8, 4, 2]


def test_tensors_of_inference_mode_and_others_are_reduced_in_either_mode() -> None:
    on_workers(2, _inference)


def _other_default_device() -> list[float]:
    with joined():
        dense, sparse = torch.ones(3), torch.eye(3).to_sparse()
        for _ in range(2):
            dist.barrier()  # both staging areas have been seen
        torch.set_default_device("meta")
        options = dist.AllreduceOptions()
        options.asyncOp = False  # in this thread, whose default it is; dist.all_reduce sets it aside in some releases
        for tensor in (dense, sparse):
            dist.group.WORLD.allreduce([tensor], options).wait()
        return sparse.to_dense().sum(0).tolist() + dense.tolist()


def test_torchs_default_device_is_nothing_to_a_collective_of_tensors_on_the_cpu() -> None:
    assert on_workers(2, _other_default_device) == [[2.0] * 6] * 2


def _between_forward_and_backward() -> list[float]:
    with joined():
        weight, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        loss = (weight * x).sum()
        dist.all_reduce(weight)
        loss.backward()
        assert x.grad is not None
        return x.grad.tolist()


def test_autograd_hears_nothing_of_a_collective_as_with_gloo() -> None:
    assert on_workers(2, _between_forward_and_backward) == [[2.0] * 3] * 2


def _expanded() -> str:
    with joined() as group:
        with pytest.raises(ValueError, match="share memory") as error:
            dist.all_reduce(torch.ones(1).expand(4) if group.rank == 1 else torch.ones(4))
        gathered = torch.zeros(4 * group.size)
        dist.all_gather_into_tensor(gathered, torch.ones(1).expand(4))  # it can be read, and the group goes on
        assert gathered.sum() == 4 * group.size
        return str(error.value)


def test_a_tensor_whose_elements_share_memory_is_not_written_and_all_ranks_say_so() -> None:
    result = on_workers(2, _expanded)
    assert result[0] == result[1]
    assert result[0].startswith("all_reduce on worker 1: a tensor whose elements share memory, as after expand(), ")


def _other_device() -> str:
    with joined() as group:
        tensor = torch.zeros(3, device="meta") if group.rank == 1 else torch.zeros(3)
        with pytest.raises(ValueError, match="meta") as error:
            dist.broadcast(tensor, 0)
        return str(error.value)


def test_a_tensor_on_another_device_is_refused_on_all_ranks() -> None:
    result = on_workers(2, _other_device)
    sentence = 'broadcast on worker 1: a tensor on meta; "lockstep" is for the CPU: use gloo, or nccl for a GPU'
    assert result[0] == result[1]
    assert sentence in result[0]


def _random_sequence(seed: int, num_operations: int) -> None:
    """The same calls on all ranks, in random order and size; each rank waits for asynchronous ones when it likes."""
    shared = random.Random(seed)
    with joined() as group:
        own = random.Random(1000 * seed + group.rank)
        open_works: list[tuple[dist.Work, torch.Tensor, torch.Tensor]] = []
        for number in range(num_operations):
            size, kind, later = (
                shared.choice((1, 50, 9_000, 70_000, 1_200_000)),
                shared.randrange(4),
                shared.random() < 0.5,
            )
            mine, total = torch.full((size,), float(group.rank + number)), float(sum(range(group.size)))
            if kind == 0:
                result, expected = mine, torch.full((size,), total + group.size * number)
                work = dist.all_reduce(result, async_op=later)
            elif kind == 1:
                result, expected = mine, torch.full((size,), float(number % group.size + number))
                work = dist.broadcast(result, number % group.size, async_op=later)
            elif kind == 2:
                result = torch.zeros(group.size * (size // 10 + 1))
                expected = torch.arange(group.size).repeat_interleave(size // 10 + 1) + float(number)
                work = dist.all_gather_into_tensor(result, mine[: size // 10 + 1].contiguous(), async_op=later)
            else:
                result = torch.zeros(size // 10 + 1)
                expected = torch.full_like(result, total + group.size * number)
                parts = mine[0].repeat(group.size * result.numel())
                work = dist.reduce_scatter_tensor(result, parts, async_op=later)
            open_works.append((work, result, expected))
            while open_works and (open_works[0][0] is None or own.random() < 0.4):
                work, result, expected = open_works.pop(0)
                assert work is None or work.wait()
                assert torch.equal(result, expected), (number, kind, size)
        for work, result, expected in open_works:
            assert work is None or work.wait()
            assert torch.equal(result, expected)


@pytest.mark.parametrize("num_workers", [2, 4])
def test_a_random_sequence_of_collectives_gives_every_result(num_workers: int) -> None:
    on_workers(num_workers, _random_sequence, num_workers, 60)


def _messages() -> None:
    with joined() as group:
        if group.rank == 0:
            dist.send(torch.tensor([1.0]), 1, tag=7)
            dist.send(torch.tensor([2.0]), 1, tag=8)
        elif group.rank == 1:
            second, first = torch.zeros(1), torch.zeros(1)
            dist.recv(second, 0, tag=8)
            dist.recv(first, 0, tag=7)
            assert (first.item(), second.item()) == (1, 2)
            column = torch.zeros(4, 2)[:, 1]
            dist.recv(column, 2)
            assert column.tolist() == [0, 1, 2, 3]
        else:
            dist.send(torch.arange(8.0)[:4], 1)
        if group.rank == 0:
            found = {}
            for _ in range(2):
                anything = torch.zeros(1, dtype=torch.int64)
                source = dist.recv(anything)
                found[source] = anything.item()
            assert found == {1: 10, 2: 20}
        else:
            dist.send(torch.tensor([10 * group.rank]), 0)


def test_messages_arrive_by_tag_and_from_any_source() -> None:
    on_workers(3, _messages)


def _exchange_both_ways() -> None:
    with joined() as group:
        other = 1 - group.rank
        sent, received = torch.full((3_000_000,), float(group.rank)), torch.zeros(3_000_000)
        operations = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(received, torch.full((3_000_000,), float(other)))


def test_two_ranks_send_each_other_megabytes_at_once() -> None:
    on_workers(2, _exchange_both_ways)


def _receive_beside_a_collective() -> None:
    with joined() as group:
        content = torch.full((3_000_000,), 1.0 - group.rank)
        if group.rank == 0:
            dist.send(content, 1)
            dist.barrier()
        else:
            work = dist.irecv(content, 0)
            dist.barrier()
            work.wait()
            assert work.is_completed()
        assert content.min() == 1


def test_a_message_that_nobody_waits_for_yet_moves_while_its_receiver_is_in_a_collective() -> None:
    on_workers(2, _receive_beside_a_collective)


def _subgroups() -> None:
    with joined() as group:
        even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
        mine = even if group.rank % 2 == 0 else odd
        tensor = torch.full((3,), float(group.rank))
        dist.all_reduce(tensor, group=mine)
        assert tensor.tolist() == [2.0 if group.rank % 2 == 0 else 4.0] * 3
        dist.broadcast(tensor, src=3 if mine is odd else 2, group=mine)
        assert dist.get_rank(mine) == group.rank // 2
        if mine is even:  # the others do something else meanwhile
            for _ in range(5):
                dist.all_reduce(tensor, group=mine)
        dist.destroy_process_group(mine)
        dist.all_reduce(whole := torch.ones(1))
        assert whole.item() == 4


def test_subgroups_are_independent_and_end_alone() -> None:
    on_workers(4, _subgroups)


def _functional() -> None:
    with joined() as group:
        reduced = functional.all_reduce(torch.full((3,), float(group.rank)), "sum", dist.group.WORLD)
        gathered = functional.all_gather_tensor(torch.full((2,), group.rank), 0, dist.group.WORLD)
        scattered = functional.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, dist.group.WORLD)
        swapped = functional.all_to_all_single(torch.arange(2) + 10 * group.rank, None, None, dist.group.WORLD)
        assert torch.as_tensor(reduced.wait()).tolist() == [1, 1, 1]
        assert torch.as_tensor(gathered.wait()).tolist() == [0, 0, 1, 1]
        assert torch.as_tensor(scattered.wait()).tolist() == [[0, 2], [4, 6]][group.rank]
        assert torch.as_tensor(swapped.wait()).tolist() == [group.rank, group.rank + 10]


def test_functional_collectives_which_come_from_cpp_arrive_here_too() -> None:
    on_workers(2, _functional)


def _objects() -> list[object]:
    with joined() as group:
        everyone: list[object] = [None] * group.size
        dist.all_gather_object(everyone, {"rank": group.rank})
        result: list[object] = [group.rank]
        dist.broadcast_object_list(result, src=1)
        return [*everyone, *result]


def test_objects_are_gathered_and_broadcast() -> None:
    assert on_workers(2, _objects) == [[{"rank": 0}, {"rank": 1}, 1]] * 2
