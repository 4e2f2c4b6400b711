"""Tests that use a GPU in their own process: run in one that sees it, since workers are forked from this one."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from gpu_processes import REPOSITORY, environment

pytestmark = pytest.mark.gpu

NEEDS_FRONT_END = pytest.mark.skipif(find_spec("cudnn") is None, reason="needs nvidia-cudnn-frontend: extra cudnn")


@pytest.mark.parametrize(
    "file",
    [
        pytest.param("determinism/test_cudnn_attention.py", marks=NEEDS_FRONT_END),
        "gradients/test_earlier_graphs.py",
        "gradients/test_fingerprint.py",
        "gradients/test_finite.py",
        "gradients/test_own_gradients.py",
        "gradients/test_losses.py",
        "state/test_exact_state.py",
        "wire/test_gpu_kernels.py",
        "wire/test_pinned.py",
    ],
)
def test_in_a_process_that_sees_the_gpu(gpu: None, file: str) -> None:
    path = Path(REPOSITORY) / "tests" / file
    words = [sys.executable, "-m", "pytest", "-rs", "-m", "cuda", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(
        words,
        env={**environment(), "CUDA_VISIBLE_DEVICES": "0"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SKIPPED" not in done.stdout
