"""`lockstep run --on ray`: runs on a cluster of two nodes, calm and disturbed, have the bits of one worker."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launched import launched, scale
from ray_clusters import REPOSITORY, RayCluster, needs_ray, ray_cluster
from ray_launches import START_S, launched_on, workers_of

pytestmark = needs_ray

EPOCHS = 60
FAILING = """
import lockstep
run = lockstep.start()
if run.rank == 1:
    raise ValueError("bad sample")
run.total(1)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(2, 2) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """Digest and number of steps of the same training on one worker that nothing happens to."""
    with launched(tmp_path_factory.mktemp("alone"), "-n", "1", epochs=EPOCHS, pause_s=0.0) as run:
        return run.finish()


def test_a_calm_run_and_one_that_shrinks_and_grows_have_the_bits_of_one_worker(
    cluster: RayCluster, tmp_path: Path, alone: tuple[str, int]
) -> None:
    with launched_on(cluster, tmp_path, "-n", "3", "--placement", "spread") as run:
        run.wait_for(r"^step \d+ workers 3$", within_s=START_S)
        scale(tmp_path / "run", 2)
        run.await_workers(2, within_s=START_S)
        scale(tmp_path / "run", 4)
        run.await_workers(4, within_s=START_S)
        assert run.finish(within_s=START_S) == alone
    assert workers_of(tmp_path) == {}


def test_a_worker_that_is_killed_is_named_and_replaced(
    cluster: RayCluster, tmp_path: Path, alone: tuple[str, int]
) -> None:
    with launched_on(cluster, tmp_path, "-n", "3") as run:
        run.wait_for(r"^step \d+ workers 3$", within_s=START_S)
        lost = workers_of(tmp_path)[1]
        lost.kill()
        run.wait_for(rf"worker 1 \(pid {lost.pid} on [\d.]+\) was killed by SIGKILL at step \d+")
        run.await_workers(2, within_s=START_S)  # a line of three workers may still have been under way
        run.await_workers(3, within_s=START_S)
        assert workers_of(tmp_path)[1].pid != lost.pid
        assert run.finish(within_s=START_S) == alone


def test_a_worker_dies_with_its_actor_and_is_replaced(
    cluster: RayCluster, tmp_path: Path, alone: tuple[str, int]
) -> None:
    with launched_on(cluster, tmp_path, "-n", "2") as run:
        run.wait_for(r"^step \d+ workers 2$", within_s=START_S)
        lost = workers_of(tmp_path)[0]
        lost.parent().kill()
        lost.wait(30)
        run.wait_for(r"worker 0 .* was killed by SIGKILL.*: its Ray actor was killed", within_s=60)
        run.await_workers(2, within_s=START_S)
        assert run.finish(within_s=START_S) == alone


def test_all_workers_that_are_killed_start_again_from_the_checkpoint(
    cluster: RayCluster, tmp_path: Path, alone: tuple[str, int]
) -> None:
    with launched_on(cluster, tmp_path, "-n", "3", "--checkpoint-every", "2 steps") as run:
        run.wait_for(r"^step 9 workers 3$", within_s=START_S)
        for worker in workers_of(tmp_path).values():
            worker.kill()
        again = run.wait_for("all 3 workers start again", within_s=60)
        first = run.wait_for(r"^step \d+ workers 3$", after=again, within_s=START_S)
        assert int(run.lines[first][1].split()[1]) > 3, "it began at a checkpoint"
        assert run.finish(within_s=START_S) == alone


def test_a_node_that_is_lost_costs_nothing_and_its_worker_comes_back_with_another_node(
    tmp_path: Path, alone: tuple[str, int]
) -> None:
    with (
        ray_cluster(2, 1) as cluster,
        launched_on(cluster, tmp_path, "-n", "3", pause_s=0.5) as run,
    ):
        run.wait_for(r"^step \d+ workers 3$", within_s=START_S)
        cluster.kill_node(1)
        run.wait_for(r"was killed by SIGKILL", within_s=60)
        run.await_workers(2, within_s=START_S)
        cluster.add_node(1)
        run.await_workers(3, within_s=START_S)
        assert run.finish(within_s=START_S) == alone


def test_an_error_of_the_script_is_named_with_its_line_and_gives_exit_code_1(
    cluster: RayCluster, tmp_path: Path
) -> None:
    with launched_on(cluster, tmp_path, "-n", "2", script=FAILING) as run:
        assert run.process.wait(START_S) == 1
        run.close()
        assert re.search(r"✗ worker 1 failed.*: ValueError: bad sample\n +train.py:5", run.shown()), run.shown()
        assert "Traceback" in (tmp_path / "run" / "worker-1.log").read_text()


def test_ctrl_c_saves_and_ends_all_with_the_command_that_goes_on(
    cluster: RayCluster, tmp_path: Path, alone: tuple[str, int]
) -> None:
    with launched_on(cluster, tmp_path, "-n", "2", "--checkpoint-every", "100 steps") as run:
        run.wait_for(r"^step \d+ workers 2$", within_s=START_S)
        workers = workers_of(tmp_path)
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(60) == 130
        run.close()
        assert f"to go on: lockstep run --on ray --address {cluster.address} -n 2" in run.shown()
        assert not any(worker.is_running() for worker in workers.values())
    with launched_on(cluster, tmp_path, "-n", "1", "--resume", "auto") as run:
        assert run.finish(within_s=START_S) == alone


def test_workers_die_with_a_launcher_that_is_killed(cluster: RayCluster, tmp_path: Path) -> None:
    with launched_on(cluster, tmp_path, "-n", "2") as run:
        run.wait_for(r"^step \d+ workers 2$", within_s=START_S)
        workers = list(workers_of(tmp_path).values())
        run.process.kill()
        assert psutil.wait_procs(workers, timeout=60)[1] == []


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:1", "there is no Ray cluster at 127.0.0.1:1: Connection refused"),
        ("ray://127.0.0.1:10001", "cannot be used: give host:port of the head"),
    ],
)
def test_a_wrong_address_is_a_sentence(tmp_path: Path, address: str, sentence: str) -> None:
    (tmp_path / "train.py").write_text("")
    words = [sys.executable, "-m", "lockstep", "run", "--on", "ray", "--address", address, "train.py"]
    ended = subprocess.run(
        words,
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode in (2, 3)
    assert sentence in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
