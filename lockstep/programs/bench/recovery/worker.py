"""What every worker of a recovery benchmark runs: a training loop that writes down its commits.

    python -m lockstep.programs.bench.recovery.worker TASK

It is lockstep's loop, or, where the task has `save_every`, the baseline's under torchrun: DDP over Gloo, which resumes
from a checkpoint if there is one. The baseline imports only a few small files of lockstep, so that a restarted worker
is ready soon.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lockstep.programs.bench.machine import describe_machine
from lockstep.programs.bench.plan import NUM_BATCHES
from lockstep.programs.bench.recovery.log import TrainingResult, TrainingTask, open_log, pass_gate
from lockstep.programs.bench.sides import TrainingSide, ddp_side, end_process, make_kit
from lockstep.programs.models import reference_workload
from lockstep.settings.environment import process_environment
from lockstep.state.tensor_file import memory_of


def main(task: TrainingTask) -> None:
    """lockstep's own loop."""
    from lockstep.run.start import start

    kit = make_kit(reference_workload(task.model))
    optimizer = torch.optim.AdamW(kit.model.parameters(), fused=True)
    inputs, targets = (torch.cat(parts) for parts in zip(*kit.batches, strict=True))
    with start(seed=0) as run, open_log(task.place, run.rank) as committed:
        run.replicate(kit.model, optimizer)
        # The batches, one after the other: from a loader, because a newcomer finds its place in the data by it.
        loader = run.shard(DataLoader(TensorDataset(inputs, targets), batch_size=kit.workload.batch_size))
        pass_gate(task.place)
        for _ in run.epochs(task.steps // NUM_BATCHES):
            for batch in loader:
                for lane_batch in run.lanes(batch):
                    kit.workload.loss(kit.model, lane_batch).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                committed(run.step, run.rank, run.size, run.guard.generation.world.generation)
        if run.rank == 0:
            TrainingResult(run.digest(), describe_machine()).leave(task.place)


def main_of_baseline(task: TrainingTask) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    side = ddp_side(make_kit(reference_workload(task.model)), rank, size)
    checkpoint, save_every = task.place / "checkpoint.pt", task.save_every or 1
    done = _load(checkpoint, side)
    restarts = int(process_environment()["TORCHELASTIC_RESTART_COUNT"])
    with open_log(task.place, rank) as committed:
        pass_gate(task.place)
        for step in range(done + 1, task.steps + 1):
            side.step(step - 1)
            if rank == 0:
                committed(step, rank, size, restarts)
                if step % save_every == 0:
                    _save(checkpoint, side, step)
    if rank == 0:
        TrainingResult(_digest(side), {}).leave(task.place)


def _load(path: Path, side: TrainingSide) -> int:
    """Loads the checkpoint, if there is one; returns how many steps it has seen."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    side.model.load_state_dict(saved["model"])
    side.optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def _save(path: Path, side: TrainingSide, step: int) -> None:
    unfinished = path.with_suffix(".unfinished")
    torch.save({"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict(), "step": step}, unfinished)
    os.replace(unfinished, path)


def _digest(side: TrainingSide) -> str:
    """SHA-256 over parameters, buffers and the optimizer's state."""
    sha256 = hashlib.sha256()
    states = [side.model.state_dict(), *side.optimizer.state_dict()["state"].values()]
    for tensor in (value for state in states for value in state.values() if torch.is_tensor(value)):
        sha256.update(memory_of(tensor.detach().contiguous()))
    return sha256.hexdigest()


if __name__ == "__main__":
    its_task = TrainingTask.read(sys.argv[1])
    if its_task.save_every is None:
        main(its_task)
    else:
        main_of_baseline(its_task)
        end_process()
