"""A script that trains a little and prints, as JSON, what the tests want to know of models and data on a GPU."""

import argparse
import json
import os
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import Run


def data() -> TensorDataset:
    return TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))


def step(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: object, seen: set[str]) -> None:
    for x, y in run.lanes(batch):
        seen.update({str(x.device.type), str(y.device.type)})
        run.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()


def warnings_of_a_product(run: Run) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.mm(torch.ones(4, 4, device=run.device), torch.ones(4, 4, device=run.device))
    return [str(warning.message) for warning in caught]


def main(num_processes: int, checkpoint: str | None) -> None:
    run = lockstep.start(lanes=4)
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    F.cross_entropy(model(torch.ones(4, 8)), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()  # state that exists before the model is moved
    optimizer.zero_grad()
    before = [id(parameter) for parameter in model.parameters()]
    run.replicate(model, optimizer)
    loader = run.shard(DataLoader(data(), batch_size=22, shuffle=True, num_workers=num_processes))
    from_loader: set[str] = set()
    plain: set[str] = set()
    for _ in run.epochs(2):
        for batch in loader:
            step(run, model, optimizer, batch, from_loader)
    whole = data().tensors
    step(run, model, optimizer, whole, plain)
    step(run, model, optimizer, tuple(tensor.to(run.device) for tensor in whole), plain)
    if checkpoint is not None:
        run.save(checkpoint)
        run.resume(checkpoint)
    model.eval()
    evaluated = [x.device.type for x, _ in run.lanes(whole)]
    total = run.total(torch.ones(2, device=run.device))
    result = {
        "device": str(run.device),
        "same_parameters": before == [id(parameter) for parameter in model.parameters()],
        "parameters": sorted({parameter.device.type for parameter in model.parameters()}),
        "buffers": sorted({buffer.device.type for buffer in model.buffers()}),
        "steps_of_adam": sorted({state["step"].device.type for state in optimizer.state.values()}),
        "averages_of_adam": sorted({state["exp_avg"].device.type for state in optimizer.state.values()}),
        "from_loader": sorted(from_loader),
        "plain": sorted(plain),
        "evaluated": sorted(set(evaluated)),
        "total": total.tolist(),
        "total_on": total.device.type,
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "warnings": warnings_of_a_product(run),
        "digest": run.digest(),
    }
    run.print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--checkpoint")
    arguments = parser.parse_args()
    main(arguments.processes, arguments.checkpoint)
