"""Launchers of others, which start all workers again when one has died: torchrun itself, and what srun would do."""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
NUM_WORKERS = 2
MOST_STARTS = 4


def torchrun(script: Path, folder: Path) -> "subprocess.Popen[bytes]":
    """torchrun on this host, whose agent starts all workers again, three times at most."""
    options = ["--standalone", "--nproc-per-node", str(NUM_WORKERS), "--max-restarts", str(MOST_STARTS - 1)]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--monitor-interval", "0.1"]
    return subprocess.Popen([*command, str(script), str(folder)], env=_environment())


def requeued_srun(script: Path, folder: Path) -> int:
    """A Slurm job that is requeued: `srun --kill-on-bad-exit` again and again until all tasks end well; how often."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for start in range(1, MOST_STARTS + 1):
        tasks = [
            subprocess.Popen([sys.executable, str(script), str(folder)], env=_environment() | _slurm(rank, port))
            for rank in range(NUM_WORKERS)
        ]
        if _all_end_well(tasks):
            return start
    raise AssertionError(f"the job did not end well in {MOST_STARTS} starts")


def _all_end_well(tasks: "Sequence[subprocess.Popen[bytes]]") -> bool:
    """Waits for all; when one fails the others are killed."""
    running = {os.pidfd_open(task.pid): task for task in tasks}
    well = True
    while running:
        for ended in select.select(list(running), [], [])[0]:
            os.close(ended)
            if running.pop(ended).wait() != 0:
                well = False
                for task in running.values():
                    task.kill()
    return well


def _slurm(rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(NUM_WORKERS),
        "SLURM_STEP_TASKS_PER_NODE": str(NUM_WORKERS),
        "MASTER_PORT": str(port),
    }


def _environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parent.parent)])}
