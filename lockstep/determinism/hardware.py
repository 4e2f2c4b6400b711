"""The properties of the machine and the switches of torch on which the bits depend, as text to compare.

# Note [Precision is the user's]
# TF32 and reductions in low precision are faster and less exact, and both are deterministic: they do not break the
# promise as long as all workers have them alike. So they are left as the user set them, compared, and recorded.
"""

import platform
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lockstep.determinism.cudnn_attention import exact_attention
from lockstep.errors import Disagreement
from lockstep.settings.environment import kernel_variables, process_environment

NO_GPU = "none"
NUMBERS = ("CPU implementer", "CPU part", "CPU variant")
PROCESSOR = "kind of processor"


def hardware(device: torch.device) -> dict[str, str]:
    """The kind of device, the GPU's name, the version of CUDA and the kernels: equal on all workers of a run."""
    on_gpu = device.type == "cuda"
    return {
        "device type": device.type,
        "GPU": gpu_name(device) if on_gpu else NO_GPU,
        "version of CUDA": str(torch.version.cuda) if on_gpu else NO_GPU,
        "backward pass of exact attention": exact_attention() if on_gpu else NO_GPU,
    }


def processor(device: torch.device) -> dict[str, str]:
    """On which CPU is computed: kernels differ in the order in which they add. Empty if a GPU computes."""
    return {PROCESSOR: f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"} if device.type == "cpu" else {}


@cache
def cpu_name() -> str:
    """The processor's own name; where the kernel gives none, as on Arm, its numbers."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    pairs = (line.partition(":") for line in lines)
    first: dict[str, str] = {}
    for key, _, value in pairs:
        first.setdefault(key.strip(), value.strip())
    numbers = [f"{key.removeprefix('CPU ')} {first[key]}" for key in NUMBERS if key in first]
    return first.get("model name") or " ".join([platform.machine(), *numbers])


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def precision() -> dict[str, str]:
    """The switches of torch that trade precision for speed. See Note [Precision is the user's]. Starts no CUDA."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    readers: dict[str, Callable[[], Any]] = {
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
        "torch.backends.cuda.matmul.allow_tf32": lambda: matmul.allow_tf32,
        "torch.backends.cuda.matmul.fp32_precision": lambda: matmul.fp32_precision,
        "torch.backends.cudnn.allow_tf32": lambda: cudnn.allow_tf32,
        "torch.backends.cudnn.conv.fp32_precision": lambda: cudnn.conv.fp32_precision,
        "torch.backends.cudnn.rnn.fp32_precision": lambda: cudnn.rnn.fp32_precision,
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
            lambda: matmul.allow_fp16_reduced_precision_reduction
        ),
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
            lambda: matmul.allow_bf16_reduced_precision_reduction
        ),
    }
    return {name: _read(reader) for name, reader in readers.items()}


def variables() -> dict[str, str]:
    return {"variables that choose kernels": kernel_variables(process_environment())}


def compared(device: torch.device) -> dict[str, str]:
    """What a newcomer must have like the others, besides the terms of the start (run/terms.py)."""
    return hardware(device) | precision()


def recorded(device: torch.device) -> dict[str, str]:
    """What a checkpoint records."""
    return compared(device) | processor(device) | variables()


def difference(saved: Mapping[str, str], here: Mapping[str, str]) -> str:
    """A sentence for a resumed run on another machine or with other switches; empty where nothing has changed."""
    others = [
        f"{name} was {saved[name]}, is {here[name]}" for name in here if saved.get(name, here[name]) != here[name]
    ]
    return f"bits may differ from here on from those of the run that was saved: {'; '.join(others)}" if others else ""


def refuse_difference(theirs: Mapping[str, str], mine: Mapping[str, str], here: int) -> None:
    """Raises unless a newcomer has the hardware and the switches of the run that it joins."""
    for name, value in mine.items():
        if theirs.get(name, value) != value:
            raise Disagreement(name, here, value, 0, theirs[name])


def _read(reader: Callable[[], Any]) -> str:
    """torch has two ways to set TF32, and refuses to read by one what was set by the other."""
    try:
        return str(reader())
    except (RuntimeError, AttributeError):
        return "unknown"
