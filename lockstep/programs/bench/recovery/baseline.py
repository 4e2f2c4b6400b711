"""What every worker of the baseline runs under torchrun: DDP over Gloo, going on from a checkpoint if there is one.

    python -m torch.distributed.run ... -m lockstep.programs.bench.recovery.baseline TASK

It is made to be fast: one thread each, shares cut before training and held in memory, gradients as views of the
buckets, a static graph, and a checkpoint on the local disk that is replaced as a whole.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from lockstep.programs.bench.recovery.commits import CommitLog
from lockstep.programs.bench.recovery.gate import pass_gate
from lockstep.programs.bench.recovery.task import Result, Task
from lockstep.programs.bench.recovery.training import Training, make_training
from lockstep.programs.models import Batch
from lockstep.settings.environment import process_environment
from lockstep.state.tensor_file import memory_of

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"


def main(task: Task) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    training = make_training(task.model)
    shares = [_cut(batch, rank, size) for batch in training.batches]
    done = _load(task, training)
    wrapped = DDP(training.model, gradient_as_bucket_view=True, static_graph=True)
    restarts = int(process_environment()[_RESTARTS])
    with CommitLog(task.place, rank) as log:
        pass_gate(task.place)
        for step in range(done + 1, task.steps + 1):
            training.workload.loss(wrapped, shares[(step - 1) % len(shares)]).backward()
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=True)
            if rank == 0:
                log.committed(step, rank, size, restarts)
                _save(task, training, step)
    if rank == 0:
        Result(_digest(training), {}).write(task.place)


def _load(task: Task, training: Training) -> int:
    """The state is that of the checkpoint, if there is one; how many steps it has seen."""
    path = _checkpoint(task)
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    training.model.load_state_dict(saved["model"])
    training.optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def _save(task: Task, training: Training, step: int) -> None:
    if task.save_every is None or step % task.save_every:
        return
    unfinished = _checkpoint(task).with_suffix(".unfinished")
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict(), "step": step}
    torch.save(state, unfinished)
    os.replace(unfinished, _checkpoint(task))


def _checkpoint(task: Task) -> Path:
    return task.place / "checkpoint.pt"


def _cut(batch: Batch, rank: int, size: int) -> Batch:
    own = slice(len(batch[0]) * rank // size, len(batch[0]) * (rank + 1) // size)
    return batch[0][own], batch[1][own]


def _digest(training: Training) -> str:
    """SHA-256 over parameters, buffers and the optimizer's state."""
    found = hashlib.sha256()
    states = [training.model.state_dict(), *training.optimizer.state_dict()["state"].values()]
    for tensor in (value for state in states for value in state.values() if torch.is_tensor(value)):
        whole = tensor.detach().contiguous()
        found.update(memory_of(whole))
    return found.hexdigest()


if __name__ == "__main__":
    main(Task.read(sys.argv[1]))
    # Not by Python's own way: torch's threads and Python's shutdown can wait for each other for ever.
    sys.stdout.flush()
    os._exit(0)
