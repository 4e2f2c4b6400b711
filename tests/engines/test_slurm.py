"""lockstep under a real Slurm: a controller and three nodes, each a machine of its own."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import SCRIPT, digest_in
from slurm_cluster import Cluster, cluster

SRUN = ("srun", "--kill-on-bad-exit=0", "--no-kill", "-N", "3", "-n", "3")


@pytest.fixture(scope="module")
def shared_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def slurm(shared_slurm: Cluster) -> Iterator[Cluster]:
    """The cluster of all tests that take nothing away from it."""
    yield shared_slurm
    shared_slurm.await_quiet()


@pytest.fixture
def own_slurm(tmp_path: Path) -> Iterator[Cluster]:
    """For a test that takes a node away."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    with cluster(folder) as found:
        yield found


def python(folder: Path, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, str(SCRIPT), str(folder), *arguments)


def await_file(path: Path, limit_s: float = 120.0) -> None:
    until_s = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < until_s, f"{path.name} did not come"
        time.sleep(0.05)


def test_three_tasks_on_three_nodes_come_to_the_bits_of_one_worker(slurm: Cluster, tmp_path: Path, calm: str) -> None:
    code, output = slurm.run(*SRUN, *python(tmp_path))
    assert (code, digest_in(output)) == (0, calm), output
    assert "3 workers" in output


def test_when_a_task_is_killed_the_others_come_to_the_same_bits(slurm: Cluster, tmp_path: Path, calm: str) -> None:
    code, output = slurm.run(*SRUN, *python(tmp_path, "--kill", "1:12"))
    assert digest_in(output) == calm, output
    assert code == 137  # srun's own: the highest of its tasks' codes


def test_when_all_tasks_are_killed_the_next_step_of_the_job_resumes(slurm: Cluster, tmp_path: Path, calm: str) -> None:
    code, output = slurm.run(*SRUN, *python(tmp_path, "--kill", "all:12"))
    assert code == 137, output
    code, output = slurm.run("srun", "-N", "2", "-n", "2", *python(tmp_path))
    assert (code, digest_in(output)) == (0, calm), output
    assert "begins at step 10" in output


def test_when_a_node_is_lost_the_others_come_to_the_same_bits(own_slurm: Cluster, tmp_path: Path, calm: str) -> None:
    with own_slurm.popen(*SRUN, *python(tmp_path, "--wait-at", "12")) as process:
        await_file(tmp_path / "reached")
        own_slurm.cut_power("n2")
        (tmp_path / "go").touch()
        output, _ = process.communicate(timeout=200)
    assert digest_in(output) == calm, output


def test_without_no_kill_the_loss_of_a_node_ends_all(own_slurm: Cluster, tmp_path: Path, calm: str) -> None:
    with own_slurm.popen("srun", "-N", "3", "-n", "3", *python(tmp_path, "--wait-at", "12")) as process:
        await_file(tmp_path / "reached")
        own_slurm.cut_power("n2")
        output, _ = process.communicate(timeout=200)
    assert process.returncode not in (0, None), output
    assert "digest" not in output
    code, output = own_slurm.run("srun", "-N", "2", "-n", "2", *python(tmp_path))
    assert (code, digest_in(output)) == (0, calm), output
