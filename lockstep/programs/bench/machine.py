"""Where it was measured, without which the numbers of a report mean nothing, and what a process holds there."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from lockstep.determinism.hardware import cpu_name
from lockstep.wire.shared.once import return_freed_memory

_PSS = Path("/proc/self/smaps_rollup")


def describe_machine(device: str = "cpu") -> dict[str, Any]:
    """This machine and its software, as a worker sees them; also its GPU, if `device` is one."""
    found = {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu_name(),
        "processor": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads_per_worker": torch.get_num_threads(),
    }
    if device != "cpu":
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "gpus": torch.cuda.device_count(),
            "gpu_bytes": torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def pss_bytes(settled: bool = False) -> int:
    """What this process holds now; of a page that several hold, its share. `settled`: freed memory is returned first.

    The workers' peaks are added up for the host, so that is an upper bound.
    """
    if settled:
        return_freed_memory()
    lines = _PSS.read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
