"""Against the naive trainer on the whole batch: the same up to rounding, uneven batches included."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import Mlp, data
from workers import on_workers

import lockstep
from lockstep.verify.reference import relative_difference, train

STEPS, BATCH = 20, 31


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(60, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x[:, None, :])


MODELS = {"mlp": Mlp, "batch norm": WithBatchNorm}


def build(name: str, double: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = MODELS[name]()
    model = model.double() if double else model
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)


def batches(double: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = data(double)
    size = [BATCH - (step % 4) for step in range(STEPS)]  # uneven in every way
    return [(x[step : step + n], y[step : step + n]) for step, n in enumerate(size)]


def naive(name: str, double: bool) -> dict[str, list[float]]:
    model, optimizer = build(name, double)
    train(model, optimizer, batches(double), lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]))
    return _values(model)


def by_lanes(name: str, double: bool, lanes: int | None) -> dict[str, list[float]]:
    run = lockstep.start(lanes=lanes)
    model, optimizer = build(name, double)
    model = lockstep.sync_batchnorm(model)
    run.replicate(model, optimizer)
    for batch in batches(double):
        for x, y in run.lanes(batch):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _values(model)


def _values(model: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.double().flatten().tolist() for name, tensor in model.state_dict().items()}


def difference(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    a, b = ({name: torch.tensor(v, dtype=torch.float64) for name, v in side.items()} for side in (one, other))
    return max(relative_difference(a, b).values())


@pytest.mark.parametrize(("double", "limit"), [(False, 1e-5), (True, 1e-12)], ids=["float32", "float64"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_lanes_agree_with_the_whole_batch_up_to_rounding(num_workers: int, double: bool, limit: float) -> None:
    plain = naive("mlp", double)
    for found in on_workers(num_workers, by_lanes, "mlp", double, 8):
        assert difference(found, plain) <= limit


@pytest.mark.parametrize(("double", "limit"), [(False, 1e-5), (True, 1e-12)], ids=["float32", "float64"])
@pytest.mark.parametrize("num_workers", [2, 3])
def test_synchronised_batch_norm_agrees_with_batch_norm_on_the_whole_batch(
    num_workers: int, double: bool, limit: float
) -> None:
    plain = naive("batch norm", double)
    for found in on_workers(num_workers, by_lanes, "batch norm", double, None):
        assert difference(found, plain) <= limit


def test_one_lane_on_one_worker_has_the_bits_of_plain_torch() -> None:
    (found,) = on_workers(1, by_lanes, "mlp", False, 1)
    assert difference(found, naive("mlp", False)) == 0.0


def ddp_and_lockstep_gradients() -> list[float]:
    """On 5 samples over 2 workers: how far DDP's and our gradient are from that of the whole batch."""
    run = lockstep.start()
    x, y = data()
    x, y = x[:5], y[:5]
    torch.manual_seed(0)
    model = Mlp()
    whole = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    ours = _lockstep_gradient(run, model, x, y)
    theirs = _ddp_gradient(run, model, x, y)
    return [_distance(found, whole) for found in (theirs, ours)]


def _lockstep_gradient(run: lockstep.Run, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    run.replicate(model)
    for lane_x, lane_y in run.lanes((x, y)):
        F.cross_entropy(model(lane_x), lane_y).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


_KEPT: list[Any] = []
"""DDP's objects stay until the worker's process ends: torch's own threads and their destruction can wait for each
other."""


def _ddp_gradient(run: lockstep.Run, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    import copy
    import os

    import torch.distributed as dist

    from lockstep.elastic.rendezvous import open_store
    from lockstep.settings.environment import find_place

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    store = open_store(find_place(os.environ), 30.0)  # that of the run
    dist.init_process_group("gloo", store=dist.PrefixStore("ddp", store), rank=run.rank, world_size=run.size)
    with run.no_sync():
        ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
        part = slice(0, 2) if run.rank == 0 else slice(2, 5)
        F.cross_entropy(ddp(x[part]), y[part]).backward()
    _KEPT.append((ddp, store))
    return [p.grad.clone() for p in ddp.module.parameters() if p.grad is not None]


def _distance(found: Any, whole: Any) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, whole, strict=True))


def test_ddp_weights_an_uneven_batch_wrongly_and_lockstep_does_not() -> None:
    for ddp, ours in on_workers(2, ddp_and_lockstep_gradients):
        assert ddp > 1e-2
        assert ours < 1e-6
