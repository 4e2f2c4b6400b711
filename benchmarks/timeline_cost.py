"""What a timeline costs while it is on, and the history that every run writes.

    lockstep run -n 2 benchmarks/timeline_cost.py mlp
    lockstep run -n 2 benchmarks/timeline_cost.py gpt 60

Steps with and without it take turns in the same processes; the ratio of each pair is with ÷ without. Without it, nobody
reads the events.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.events import Event
from lockstep.observe.history import READ, StepHistory
from lockstep.observe.timeline.part import PartWriter
from lockstep.programs.bench.spread import quantile
from lockstep.programs.models import Workload, reference_workload
from lockstep.run.run import Run

PAIRS = 300
WARM_UP = 10
NUM_BATCHES = 8


def switches(run: Run, folder: Path, what: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """Two functions: the next steps are recorded, or are not."""
    events = run._events
    writer = PartWriter(events, folder, "cpu", lambda: 1, events.note)
    history = StepHistory(folder, lambda: run.is_first, dict, events.note)

    def on() -> None:
        if what == "timeline":
            writer.begin()
        else:
            events.subscribe(history, *READ)
        _find_readers(run)

    def off() -> None:
        writer.close()
        events.unsubscribe(history)
        _find_readers(run)

    return on, off


def _find_readers(run: Run) -> None:
    """Who reads what is looked up once after a change: not in the time of the step."""
    for kind in Event.__subclasses__():
        run._events.has_readers(kind)


def train(run: Run, workload: Workload, pairs: int, what: str) -> tuple[list[float], list[float]]:
    """The ratios, and the times without."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (
        torch.cat(parts) for parts in zip(*(workload.make_batch(generator) for _ in range(NUM_BATCHES)), strict=True)
    )
    model = workload.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run.replicate(model, optimizer)
    loader = run.shard(DataLoader(TensorDataset(inputs, targets), batch_size=workload.batch_size, shuffle=True))
    with tempfile.TemporaryDirectory() as folder:
        on, off = switches(run, Path(folder), what)
        order = [on] * WARM_UP + [switch for pair in range(pairs) for switch in ((on, off) if pair % 2 else (off, on))]
        taken: dict[Callable[[], None], list[float]] = {on: [], off: []}
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


def main(model: str, pairs: int) -> None:
    for what in ("timeline", "history"):
        with lockstep.start(seed=0, drift_every=0, recover=False) as run:
            ratios, without = train(run, reference_workload(model), pairs, what)
            low, middle, high = (quantile(ratios, part) for part in (0.25, 0.5, 0.75))
            run.print(
                f"{model}, {what}: {statistics.median(without) * 1000:.1f} ms a step; with ÷ without {middle:.4f} "
                f"({low:.3f} to {high:.3f}, {pairs} pairs)"
            )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "mlp", int(sys.argv[2]) if len(sys.argv) > 2 else PAIRS)
