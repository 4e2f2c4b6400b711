"""Futures and their callbacks: what a callback asks for goes on while it waits."""

from datetime import timedelta

import torch
import torch.distributed as dist
from groups import joined
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import on_workers


def _ask_in_a_callback() -> list[float]:
    with joined():
        nested, plain = torch.ones(2), torch.ones(2)

        def ask(_: object) -> None:
            dist.all_reduce(nested, async_op=True).get_future().wait()
            dist.all_reduce(plain, async_op=True).wait()

        dist.all_reduce(torch.ones(100_000), async_op=True).get_future().then(ask).wait()
        return [*nested.tolist(), *plain.tolist()]


def test_a_callback_may_ask_for_another_operation_and_wait_for_it() -> None:
    assert on_workers(2, _ask_in_a_callback, limit_s=20) == [[2.0] * 4] * 2


def _wait_in_a_callback() -> float:
    with joined():
        behind = torch.ones(500_000)
        future = dist.all_reduce(torch.ones(500_000), async_op=True).get_future()
        work = dist.all_reduce(behind, async_op=True)
        future.then(lambda _: work.wait()).wait()
        return float(behind.min())


def test_a_callback_may_wait_for_an_operation_that_stands_behind_its_own() -> None:
    assert on_workers(2, _wait_in_a_callback, limit_s=20) == [2, 2]


def _end_in_a_callback() -> None:
    with joined():
        group = dist.new_group()
        future = dist.all_reduce(torch.ones(100_000), group=group, async_op=True).get_future()
        future.then(lambda _: group.shutdown()).wait()


def test_a_callback_may_end_its_group() -> None:
    on_workers(2, _end_in_a_callback, limit_s=20)


def _power_sgd(backend: str) -> list[float]:
    with joined(backend) as group:
        torch.manual_seed(0)
        model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
        state = power_sgd.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, power_sgd.powerSGD_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 8) + group.rank).square().mean().backward()
            optimizer.step()
        return model.module[0].weight.flatten().tolist()


def test_ddp_trains_with_power_sgd_as_on_gloo() -> None:
    assert on_workers(2, _power_sgd, "lockstep", limit_s=30) == on_workers(2, _power_sgd, "gloo", limit_s=30)


def _receive_the_second_first() -> list[float]:
    with joined() as group:
        first, second = torch.zeros(2), torch.zeros(2)
        if group.rank == 0:
            late, early = dist.irecv(first, 1), dist.irecv(second, 2)
            dist.barrier()
            early.wait(timedelta(seconds=10))
            dist.send(second, 1)  # only now the other one is sent
            late.wait()
        elif group.rank == 1:
            dist.barrier()
            dist.recv(first, 0)
            dist.send(first + 1, 0)
        else:
            dist.barrier()
            dist.send(torch.ones(2), 0)
        return [*first.tolist(), *second.tolist()]


def test_a_wait_with_a_time_limit_ends_although_an_earlier_message_is_still_open() -> None:
    assert on_workers(3, _receive_the_second_first, limit_s=20)[0] == [2, 2, 1, 1]


def _futures_after_a_collective() -> list[float]:
    with joined() as group:
        found = []
        for number in range(3):
            content = torch.full((2,), float(number))
            if group.rank == 0:
                content.zero_()
                work = dist.irecv(content, 1)
                dist.barrier()  # the message was handed over, and its future is asked for
                found += work.get_future().wait()[0].tolist()
            else:
                dist.barrier()
                dist.send(content, 0)
        return found


def test_every_message_that_was_handed_over_has_a_future_too() -> None:
    assert on_workers(2, _futures_after_a_collective, limit_s=20)[0] == [0, 0, 1, 1, 2, 2]
