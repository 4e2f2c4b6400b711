"""Steps with and without something, in turns in the same processes: for benchmarks of what that something costs."""

import sys
import time
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep.programs.models import Workload
from lockstep.run.run import Run

PAIRS = 300
WARM_UP = 10
NUM_BATCHES = 8

Switch = Callable[[], None]


def words() -> tuple[str, int]:
    """The model and the number of pairs that the command line names."""
    return sys.argv[1] if len(sys.argv) > 1 else "mlp", int(sys.argv[2]) if len(sys.argv) > 2 else PAIRS


def paired(run: Run, workload: Workload, pairs: int, on: Switch, off: Switch) -> tuple[list[float], list[float]]:
    """The ratio of each pair, with ÷ without, and the times without.

    `on` and `off` are called between steps, and may be called twice in a row.
    """
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (
        torch.cat(parts) for parts in zip(*(workload.make_batch(generator) for _ in range(NUM_BATCHES)), strict=True)
    )
    model = workload.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run.replicate(model, optimizer)
    loader = run.shard(DataLoader(TensorDataset(inputs, targets), batch_size=workload.batch_size, shuffle=True))
    order = [on] * WARM_UP + [switch for pair in range(pairs) for switch in ((on, off) if pair % 2 else (off, on))]
    taken: dict[Switch, list[float]] = {on: [], off: []}
    while run.step < len(order):
        for batch in loader:
            if run.step == len(order):
                break
            switch, is_warm = order[run.step], run.step >= WARM_UP
            off()
            switch()
            began_s = time.perf_counter()
            for lane in run.lanes(batch):
                run.backward(workload.loss(model, lane))
            optimizer.step()
            optimizer.zero_grad()
            if is_warm:
                taken[switch].append(time.perf_counter() - began_s)
    off()
    return [a / b for a, b in zip(taken[on], taken[off], strict=True)], taken[off]
