"""Tests that need a GPU. The test's own process never sees one, so each runs in processes of its own.

Where there is no GPU they are skipped, with a reason. Machines without NVIDIA's driver pay nothing for finding out.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from gpu_processes import environment
from together import RunPool, Together

DRIVER = ("/dev/nvidia0", "/proc/driver/nvidia")
COUNT = "import torch; print(torch.cuda.device_count())"
ASKING_S = 120.0
LIMIT_S = 150.0

Launched = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def num_gpus() -> int:
    if not any(Path(path).exists() for path in DRIVER):
        return 0
    words = [sys.executable, "-c", COUNT]
    asked = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=ASKING_S, check=False)
    return int(asked.stdout.strip() or 0) if asked.returncode == 0 else 0


@pytest.fixture(scope="session")
def gpu(num_gpus: int) -> None:
    """Skips where there is no GPU."""
    if num_gpus == 0:
        pytest.skip("no GPU here: there is no NVIDIA driver, or torch finds no device")


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest, gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunPool]:
    """The runs that all chosen tests want; they go on in the background, and none is left afterwards.

    Where several processes test, each makes those of a file when it comes to it.
    """
    before = set(psutil.Process().children(recursive=True))
    runs = RunPool(request.session.items, tmp_path_factory.mktemp("runs"))
    for file in Together.everyone if "PYTEST_XDIST_WORKER" not in os.environ else ():
        runs.start(file)
    yield runs
    runs.close()
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left, f"runs have left processes behind: {left}"


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """In the place of the check after every test: processes of runs for later tests are there in the background."""
    before = {**os.environ, "PYTEST_CURRENT_TEST": ""}
    yield
    assert {**os.environ, "PYTEST_CURRENT_TEST": ""} == before


@pytest.fixture(scope="session")
def launched(gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Runs `lockstep run -n N [options] script [arguments]` where GPUs can be seen; gives what came of it."""

    def launch(
        num_workers: int, script: Path, *arguments: str, options: tuple[str, ...] = ()
    ) -> "subprocess.CompletedProcess[str]":
        run_dir = tmp_path_factory.mktemp("launched") / "run"
        words = ["-m", "lockstep", "run", "-n", str(num_workers), "--run-dir", str(run_dir), *options, str(script)]
        return subprocess.run(
            [sys.executable, *words, *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    return launch
