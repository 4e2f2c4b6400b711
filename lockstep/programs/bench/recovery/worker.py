"""What every worker of lockstep's sides runs: an ordinary training loop that writes down its commits.

python -m lockstep.programs.bench.recovery.worker TASK
"""

import sys

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lockstep.data import GlobalBatch
from lockstep.programs.bench.machine import describe_machine
from lockstep.programs.bench.recovery.commits import CommitLog
from lockstep.programs.bench.recovery.gate import pass_gate
from lockstep.programs.bench.recovery.plan import NUM_BATCHES
from lockstep.programs.bench.recovery.task import Result, Task
from lockstep.programs.bench.recovery.training import Training, make_training
from lockstep.run.run import Run
from lockstep.run.start import start


def main(task: Task) -> None:
    training = make_training(task.model)
    with start(seed=0) as run, CommitLog(task.place, run.rank) as log:
        run.replicate(training.model, training.optimizer)
        loader = run.shard(_loader(training))
        pass_gate(task.place)
        for _ in run.epochs(task.steps // NUM_BATCHES):
            for batch in loader:
                _step(run, training, batch)
                log.committed(run.step, run.rank, run.size, generation(run))
        if run.rank == 0:
            Result(run.digest(), describe_machine()).write(task.place)


def generation(run: Run) -> int:
    """How many times the group of workers was formed, the first included."""
    return run.guard.generation.world.generation


def _step(run: Run, training: Training, batch: GlobalBatch) -> None:
    for lane_batch in run.lanes(batch):
        training.workload.loss(training.model, lane_batch).backward()
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)


def _loader(training: Training) -> DataLoader[tuple[Tensor, ...]]:
    """The batches, one after the other: from a loader, because a newcomer finds its place in the data by it."""
    inputs, targets = (torch.cat(parts) for parts in zip(*training.batches, strict=True))
    return DataLoader(TensorDataset(inputs, targets), batch_size=training.workload.batch_size)


if __name__ == "__main__":
    main(Task.read(sys.argv[1]))
