"""Which GPUs there are, by the driver's own tool and by what torch was built for; without importing torch."""

import re
import shutil
import subprocess
from importlib import util
from pathlib import Path

import psutil

from lockstep.programs.doctor.amounts import MiB
from lockstep.programs.doctor.facts import Gpus

ASKING_S = 5.0
_QUERY = ("--query-gpu=name,memory.free", "--format=csv,noheader,nounits")
_MPS_DAEMON = "nvidia-cuda-mps-control"


def gpus() -> Gpus:
    """Without the tool the kernel's names count. MPS is the daemon by which several processes share a GPU."""
    told = _ask_tool()
    names = tuple(name for name, _ in told) if told is not None else _names_by_kernel()
    free_bytes = tuple(free for _, free in told) if told is not None else None
    return Gpus(names, free_bytes, _cuda_of_torch(), bool(names) and _mps_runs())


def parse(lines: str) -> list[tuple[str, int]]:
    """Each GPU's name and free bytes in `NVIDIA H200, 142771`; what does not look so is left out."""
    found = (re.fullmatch(r"(.+), (\d+)", line.strip()) for line in lines.splitlines())
    return [(match[1], int(match[2]) * MiB) for match in found if match]


def _ask_tool() -> list[tuple[str, int]] | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        answer = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=ASKING_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse(answer.stdout)


def _names_by_kernel() -> tuple[str, ...]:
    told = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    found = (re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE) for path in told)
    return tuple(match[1].strip() if match else "GPU" for match in found)


def _cuda_of_torch() -> str | None:
    """The version of CUDA in torch's version file; None for a torch without it, and where there is no torch."""
    torch = util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    try:
        text = (Path(torch.origin).parent / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*= *['\"](.+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _mps_runs() -> bool:
    """The kernel keeps 15 letters of a process's name."""
    return any(process.info["name"] == _MPS_DAEMON[:15] for process in psutil.process_iter(["name"]))
