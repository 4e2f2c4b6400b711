"""Where it was measured: the part of a report without which its numbers mean nothing."""

import os
import platform
from typing import Any

import torch

from lockstep.determinism.hardware import cpu_name


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
