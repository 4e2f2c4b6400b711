"""A DDP script as everyone writes it; only the name of the backend is new, and the import that makes it known.

    torchrun --nproc-per-node 2 examples/ddp_unchanged.py
    torchrun --nproc-per-node 2 examples/ddp_unchanged.py --backend gloo
    lockstep run -n 2 --torch-distributed examples/ddp_unchanged.py
    python examples/ddp_unchanged.py                    # starts its two processes itself

Look at the last line: on two processes the weights have the same bits on both backends. lockstep.start is not used,
so this is DDP, with DDP's meaning of a batch: compare with 02_lockstep.py.
"""

import argparse
import hashlib
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lockstep  # noqa: F401 - makes the backend known


def spirals(num_points: int) -> TensorDataset:
    """Points on three arms of a spiral, in random order; the label is the arm."""
    arm = torch.randint(0, 3, (num_points,))
    radius = torch.rand(num_points)
    angle = 4 * radius + 2.1 * arm + 0.2 * torch.randn(num_points)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm)


def train() -> None:
    torch.manual_seed(0)
    data = spirals(960)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=48, sampler=sampler)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}  loss of the last batch {mean.item():.6f}")

    if dist.get_rank() == 0:
        bits = b"".join(value.numpy().tobytes() for value in model.module.state_dict().values())
        print(f"weights {hashlib.sha256(bits).hexdigest()}")


def main(backend: str, rank: int = -1, size: int = -1, init_method: str | None = None) -> None:
    dist.init_process_group(backend, init_method, rank=rank, world_size=size)
    try:
        train()
    finally:
        dist.destroy_process_group()


def start_two(backend: str) -> None:
    """What torchrun does, for a reader without it at hand."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("fork")
        processes = [
            context.Process(target=main, args=(backend, rank, 2, f"file://{folder}/store")) for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="lockstep")
    chosen = parser.parse_args().backend
    main(chosen) if "RANK" in os.environ else start_two(chosen)
