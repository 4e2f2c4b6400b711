"""Unchanged scripts of torch's own data parallelism train the same on this backend as on Gloo."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from groups import joined
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import on_workers

Numbers = list[float]


def network(*, normalised: bool = False) -> nn.Module:
    """With Adam not normalised: the gradient of a bias before batch norm is rounding error, which Adam blows up."""
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(300) if normalised else nn.Identity()
    return nn.Sequential(nn.Linear(8, 300), middle, nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, num_steps: int) -> None:
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(num_steps):
        x, y = torch.randn(16, 8, generator=data), torch.randn(16, 2, generator=data)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def numbers(model: nn.Module) -> Numbers:
    return torch.cat([value.detach().flatten()[:50].double() for value in model.state_dict().values()]).tolist()


def _ddp(backend: str) -> Numbers:
    with joined(backend) as group:
        model = DDP(network(normalised=True), bucket_cap_mb=0.1)
        train(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), group.rank, 20)
        return numbers(model.module)


def _zero(backend: str) -> Numbers:
    with joined(backend) as group:
        model = DDP(network())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        train(model, optimizer, group.rank, 5)
        optimizer.consolidate_state_dict(to=0)
        return numbers(model.module)


def _fsdp(backend: str) -> Numbers:
    with joined(backend) as group:
        mesh = init_device_mesh("cpu", (group.size,))
        model = network()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model, torch.optim.Adam(model.parameters(), lr=0.01), group.rank, 5)
        return torch.cat([p.full_tensor().detach().flatten()[:50].double() for p in model.parameters()]).tolist()


@pytest.mark.parametrize("job", [_ddp, _zero, _fsdp])
def test_two_ranks_train_to_the_same_bits_as_on_gloo(job: Callable[[str], Numbers]) -> None:
    ours, theirs = on_workers(2, job, "lockstep"), on_workers(2, job, "gloo")
    assert ours == theirs


@pytest.mark.parametrize("job", [_ddp, _zero, _fsdp])
def test_three_ranks_train_to_the_same_numbers_as_on_gloo(job: Callable[[str], Numbers]) -> None:
    ours, theirs = on_workers(3, job, "lockstep"), on_workers(3, job, "gloo")
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-5, abs=1e-6)


def _hooks_and_sparse() -> Numbers:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    with joined() as group:
        model = DDP(nn.Linear(8, 2))
        model.register_comm_hook(None, fp16_compress_hook)
        train(model, torch.optim.SGD(model.parameters(), lr=0.05), group.rank, 3)
        table = DDP(nn.EmbeddingBag(10, 4, sparse=True))
        table(torch.tensor([[group.rank, 2]])).sum().backward()
        return [*numbers(model.module), float(table.module.weight.grad.to_dense().sum())]


def test_ddp_with_a_communication_hook_and_with_sparse_gradients_keeps_ranks_equal() -> None:
    first, second = on_workers(2, _hooks_and_sparse)
    assert first == second


def _uneven() -> list[float]:
    with joined() as group:
        torch.manual_seed(0)
        model = DDP(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for _ in range(2 + group.rank):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        dist.barrier()
        return [round(value, 5) for value in model.module.weight.flatten().tolist()]


def test_ddp_joins_ranks_with_fewer_batches() -> None:
    first, second = on_workers(2, _uneven)
    assert first == second
