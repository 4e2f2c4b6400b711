"""Ray Train with `LockstepConfig`: calm and disturbed runs have the bits of one worker, and `fit` returns."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launched import Launched, launched
from ray_clusters import RayCluster, needs_ray, ray_cluster
from ray_launches import START_S, followed

pytestmark = needs_ray

EPOCHS = 30


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """Digest and number of steps of the same training on one worker that nothing happens to."""
    with launched(tmp_path_factory.mktemp("alone"), "-n", "1", epochs=EPOCHS, pause_s=0.0) as run:
        return run.finish()


@contextmanager
def trained(
    cluster: RayCluster, folder: Path, num_workers: int, pause_s: float = 0.5, checkpoints: Path | None = None
) -> Iterator[Launched]:
    """The script under way; afterwards its driver has ended."""
    config = {
        "address": cluster.address,
        "folder": str(folder),
        "num_workers": num_workers,
        "epochs": EPOCHS,
        "pause_s": pause_s,
        "checkpoints": None if checkpoints is None else str(checkpoints),
    }
    quiet = {"RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}
    command = [sys.executable, str(Path(__file__).parent / "train_script.py"), json.dumps(config)]
    with followed(command, folder, {**cluster.variables, **quiet}) as run:
        yield run


def ended(run: Launched) -> tuple[str, int]:
    """Lets the run come to its end, and `fit` return; gives digest and number of steps."""
    (run.folder / "hurry").touch()
    run.wait_for("fit has returned: None", within_s=START_S)
    found = re.search(r"digest (\w+) (\d+)$", run.shown(), re.MULTILINE)
    assert found, run.shown()
    return found[1], int(found[2])


def process_in(run: Launched, slot: int, after: int = 0) -> int:
    """The process that has come into the slot. Ray shows each line of a worker twice."""
    line = run.wait_for(rf"here is {slot} process \d+", after=after, within_s=START_S)
    return int(run.lines[line][1].split()[-1])


def test_a_worker_that_is_killed_is_replaced_while_the_others_go_on(tmp_path: Path, alone: tuple[str, int]) -> None:
    with ray_cluster(4) as cluster, trained(cluster, tmp_path, 3) as run:
        run.wait_for(r"step \d+ workers 3$", within_s=START_S)
        lost, before = process_in(run, 1), len(run.lines)
        os.kill(lost, signal.SIGKILL)
        run.wait_for(r"step \d+ workers 2$", within_s=60)
        assert process_in(run, 1, after=before) != lost
        run.wait_for(r"step \d+ workers 3$", after=len(run.lines), within_s=START_S)
        assert ended(run) == alone


def test_fit_returns_although_the_others_finish_before_a_replacement_comes(
    tmp_path: Path, alone: tuple[str, int]
) -> None:
    with ray_cluster(3) as cluster, trained(cluster, tmp_path, 2) as run:
        run.wait_for(r"step \d+ workers 2$", within_s=START_S)
        lost = process_in(run, 1)
        (tmp_path / "hurry").touch()
        os.kill(lost, signal.SIGKILL)
        assert ended(run) == alone


def test_all_workers_that_are_killed_start_again_from_the_checkpoint(tmp_path: Path, alone: tuple[str, int]) -> None:
    with ray_cluster(3) as cluster, trained(cluster, tmp_path, 2, checkpoints=tmp_path / "saved") as run:
        run.wait_for(r"step 9 workers 2$", within_s=START_S)
        for slot in (0, 1):
            os.kill(process_in(run, slot), signal.SIGKILL)
        killed = len(run.lines)
        again = run.wait_for(r"step \d+ workers 2$", after=killed, within_s=START_S)
        assert int(run.lines[again][1].split()[-3]) > 3, "it began at a checkpoint"
        assert ended(run) == alone


def test_a_node_that_is_lost_costs_nothing(tmp_path: Path, alone: tuple[str, int]) -> None:
    with ray_cluster(2, 1) as cluster, trained(cluster, tmp_path, 3) as run:  # no node is without a worker
        run.wait_for(r"step \d+ workers 3$", within_s=START_S)
        cluster.kill_node(1)
        run.wait_for(r"step \d+ workers 2$", within_s=60)
        cluster.add_node(1)
        assert ended(run) == alone
