"""Steps with and without something, in turns in the same processes: for benchmarks of what that something costs."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep.programs.models import Workload
from lockstep.run.run import Run

PAIRS = 300
WARM_UP = 10
NUM_BATCHES = 8

Switch = Callable[[], None]


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Switches:
    """`on` and `off` are called between steps, and may be called twice in a row; `after` ends a step that is on."""

    on: Switch
    off: Switch
    after: Switch = _nothing


def words() -> tuple[str, int]:
    """The model and the number of pairs that the command line names."""
    return sys.argv[1] if len(sys.argv) > 1 else "mlp", int(sys.argv[2]) if len(sys.argv) > 2 else PAIRS


def paired(run: Run, workload: Workload, pairs: int, switches: Switches) -> tuple[list[float], list[float]]:
    """The times of the steps with it, and of those without, in the order of the pairs."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (
        torch.cat(parts) for parts in zip(*(workload.make_batch(generator) for _ in range(NUM_BATCHES)), strict=True)
    )
    model = workload.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run.replicate(model, optimizer)
    loader = run.shard(DataLoader(TensorDataset(inputs, targets), batch_size=workload.batch_size, shuffle=True))
    turns = [is_on for pair in range(pairs) for is_on in ((True, False) if pair % 2 else (False, True))]
    order = [True] * WARM_UP + turns
    taken: dict[bool, list[float]] = {True: [], False: []}
    while run.step < len(order):
        for batch in loader:
            if run.step == len(order):
                break
            is_on, is_warm = order[run.step], run.step >= WARM_UP
            switches.off()
            if is_on:
                switches.on()
            began_s = time.perf_counter()
            for lane in run.lanes(batch):
                run.backward(workload.loss(model, lane))
            optimizer.step()
            optimizer.zero_grad()
            if is_on:
                switches.after()
            if is_warm:
                taken[is_on].append(time.perf_counter() - began_s)
    switches.off()
    return taken[True], taken[False]
