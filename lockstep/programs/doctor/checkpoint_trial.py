"""Tries whether a checkpoint can be written and read: in a process of its own, because that needs torch.

    python -m lockstep.programs.doctor.checkpoint_trial

tries it in this process, and shows the traceback of a failure.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

TRYING_S = 60.0


def try_saving() -> str:
    """What keeps a checkpoint from being saved and loaded in a temporary folder; empty if nothing does."""
    try:
        ended = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, timeout=TRYING_S)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
    return "" if ended.returncode == 0 else lines[-1]


def save_and_load(folder: Path) -> None:
    """Raises what keeps a checkpoint from being written to `folder`, or from being read as it was."""
    import torch

    from lockstep.state.checkpoints.file import read, write
    from lockstep.state.snapshot import Snapshot

    tensors = {
        "float": torch.randn(5, 3),
        "integer": torch.arange(4),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    }
    write(folder / "trial", Snapshot(tensors, {"step": 0}))
    loaded = read(folder / "trial").tensors
    if loaded.keys() != tensors.keys() or not all(torch.equal(loaded[name], tensors[name]) for name in tensors):
        raise RuntimeError("what is read is not what was written")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        save_and_load(Path(folder))
