"""Under launchers that start everything again when a worker dies, a script with checkpoints goes on by itself."""

import json
from pathlib import Path
from typing import Any

import pytest
from hosts_launchers import HERE, NUM_WORKERS, requeued_srun, torchrun
from hosts_resuming import JOB, STEP
from training import digest_after
from workers import on_workers

SCRIPT = HERE / "hosts_resuming.py"


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of one training under each launcher, at the same time: most of it is loading torch."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("torchrun", "srun")}
    with torchrun(SCRIPT, folders["torchrun"]) as agent:
        assert requeued_srun(SCRIPT, folders["srun"]) == 2
        assert agent.wait() == 0
    return folders


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_after_a_worker_died_and_all_were_started_again_the_run_goes_on_from_its_checkpoint(
    launcher: str, restarted: dict[str, Path]
) -> None:
    assert (restarted[launcher] / "died").exists(), "the scripted death never came"
    assert 0 < _end(restarted[launcher])["begun"] <= STEP


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_run_that_was_started_again_ends_with_the_bits_of_one_that_was_never_stopped(
    launcher: str, restarted: dict[str, Path]
) -> None:
    end = _end(restarted[launcher])
    assert [end["digest"], end["step"]] == on_workers(1, digest_after, JOB)[0]
    assert end["size"] == NUM_WORKERS


def _end(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "end.json").read_text())
    return found
