"""Where it was measured: the part of a report without which its numbers mean nothing."""

import os
import platform
from pathlib import Path
from typing import Any

import torch


def describe_machine(device: str = "cpu") -> dict[str, Any]:
    """This machine and its software, as a worker sees them; also its GPU, if `device` is one."""
    found = {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
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


def _cpu() -> str:
    """The processor's own name; Arm's kernels give none, there it is the kind of processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()
