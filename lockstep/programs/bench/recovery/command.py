"""The command that starts a run of each side. Nothing runs here."""

import sys
from pathlib import Path

from lockstep.programs.bench.recovery.plan import Plan, Side
from lockstep.programs.bench.recovery.task import Task

WORKER = "lockstep.programs.bench.recovery.worker"
BASELINE = "lockstep.programs.bench.recovery.baseline"

VARIABLES = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
"""For all sides: connections stay on this host, and a worker has one thread. The last one is torchrun's.

By default torchrun keeps one store for all attempts. Restarted workers then find the addresses of the dead ones in it,
and fail or hang (https://github.com/pytorch/pytorch/issues/135712); with it, every attempt has a store of its own.
"""


def command_of(side: Side, plan: Plan, task: Task, run_dir: Path) -> list[str]:
    """What a user would type."""
    return _lockstep(side, plan, task, run_dir) if side.is_lockstep else _torchrun(plan, task)


def _lockstep(side: Side, plan: Plan, task: Task, run_dir: Path) -> list[str]:
    options = {
        "--workers": plan.workers,
        "--lanes": plan.lanes,
        "--threads": 1,
        "--spares": side.spares,
        "--run-dir": run_dir,
    }
    words = [str(word) for option in options.items() for word in option]
    words.append("--copies" if side.copies else "--no-copies")
    return [sys.executable, "-m", "lockstep", "run", *words, "-m", WORKER, task.written()]


def _torchrun(plan: Plan, task: Task) -> list[str]:
    """The interval is how long torchrun sleeps between two looks at its workers."""
    options = {"--nproc-per-node": plan.workers, "--max-restarts": 3, "--monitor-interval": 0.1}
    words = [str(word) for option in options.items() for word in option]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *words, "-m", BASELINE, task.written()]
