"""Every example runs on a GPU; some print the same on one worker and on two that share it, as all do on CPUs."""

import subprocess
import sys
from pathlib import Path

import pytest
from gpu_processes import REPOSITORY, environment
from together import Outcome, RunPool, Together, Wanted

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

LIMIT_S = 240.0
EXAMPLES = sorted(path.stem for path in (REPOSITORY / "examples").glob("[0-9]*.py"))
ARGUMENTS = {
    "10_save_resume": ["checkpoint"],
    "11_checkpoints": ["checkpoints"],
    "20_timeline": ["timeline"],
    "21_lightning": ["checkpoints"],
}
ALONE = {"01_plain"}
"""Has no lockstep in it."""
SHARED = ("02_lockstep", "05_evaluation", "07_mixed_precision", "08_two_optimizers", "10_save_resume", "17_captured",
          "18_carried")  # fmt: skip
"""Run on two workers too: each has something of its own that meets the GPU."""


def launch(words: Wanted, folder: Path) -> str:
    """What an example printed on so many workers."""
    example, num_workers = words
    folder.mkdir()
    script = str(REPOSITORY / "examples" / f"{example}.py")
    launcher = ["-m", "lockstep", "run", "-n", num_workers, "--run-dir", str(folder / "run"), "--device", "cuda"]
    command = [sys.executable, *(() if example in ALONE else launcher), script, *ARGUMENTS.get(example, [])]
    done = subprocess.run(
        command, env=environment(), cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return "".join(line for line in done.stdout.splitlines(True) if not line.startswith(("lockstep ", "  ")))


RUNS = Together(launch, __file__)
run = RUNS.run


@pytest.fixture(scope="module")
def printed(pool: RunPool) -> Outcome:
    return RUNS.outcomes(pool)


@pytest.mark.parametrize("alone", [run(example, 1) for example in EXAMPLES], ids=str)
def test_an_example_runs_on_a_gpu(printed: Outcome, alone: Wanted) -> None:
    assert printed(alone)


@pytest.mark.parametrize(("one", "two"), [(run(example, 1), run(example, 2)) for example in SHARED], ids=str)
def test_an_example_prints_the_same_on_two_workers_that_share_a_gpu(printed: Outcome, one: Wanted, two: Wanted) -> None:
    assert printed(two) == printed(one)
