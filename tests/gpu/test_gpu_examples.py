"""Every example runs on a GPU, and prints the same on one worker and on two that share it."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gpu_processes import REPOSITORY, environment

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

LIMIT_S = 240.0
AT_A_TIME = 8
EXAMPLES = sorted(path.stem for path in (REPOSITORY / "examples").glob("[0-9]*.py"))
ARGUMENTS = {"10_save_resume": ["checkpoint"], "11_checkpoints": ["checkpoints"]}
ALONE = {"01_plain"}
"""Has no lockstep in it."""
DIFFERS = {"06_sync_batchnorm": "one lane per worker", "12_lost_worker": "kills one of its workers"}
"""What is not the same on another number of workers, and why."""

Printed = Callable[[str, int], str]


def run(example: str, num_workers: int, folder: Path) -> str:
    folder.mkdir()
    script = str(REPOSITORY / "examples" / f"{example}.py")
    launcher = ["-m", "lockstep", "run", "-n", str(num_workers), "--run-dir", str(folder / "run"), "--device", "cuda"]
    words = [sys.executable, *(() if example in ALONE else launcher), script, *ARGUMENTS.get(example, [])]
    done = subprocess.run(
        words, env=environment(), cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return "".join(line for line in done.stdout.splitlines(True) if not line.startswith(("lockstep ", "  ")))


@pytest.fixture(scope="module")
def printed(num_gpus: int, tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """What an example printed. All have run when this is there, a few at a time."""
    if num_gpus == 0:
        pytest.skip("no GPU here: there is no NVIDIA driver, or torch finds no device")
    folder = tmp_path_factory.mktemp("examples")
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        futures = {
            (example, number): pool.submit(run, example, number, folder / f"{example}-{number}")
            for example in EXAMPLES
            for number in ((1,) if example in ALONE else (1, 2))
        }
    return lambda example, number: futures[example, number].result()


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_on_a_gpu(printed: Printed, example: str) -> None:
    assert printed(example, 1)


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e not in ALONE | DIFFERS.keys()])
def test_an_example_prints_the_same_on_two_workers_that_share_a_gpu(printed: Printed, example: str) -> None:
    assert printed(example, 2) == printed(example, 1)
