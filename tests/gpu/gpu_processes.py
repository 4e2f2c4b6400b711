"""Where the processes of GPU tests run: in the source tree, with GPUs to be seen."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """That of the tests without the variable that hides GPUs from them, and with the source tree first."""
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), kept.get("PYTHONPATH", "")]).strip(os.pathsep)}
