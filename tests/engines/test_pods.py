"""Pods that are played by machines: what an Indexed Job of Kubernetes comes to."""

import importlib.util
from pathlib import Path

import pytest
from engine_runs import SCRIPT, await_file, digest_in
from pods import indexed_job

needs_roster = pytest.mark.skipif(
    importlib.util.find_spec("lockstep.elastic.roster") is None, reason="there is no roster yet by which a pod joins"
)
THREE = {"LOCKSTEP_WORKERS": "3"}


def test_three_pods_come_to_the_bits_of_one_worker(tmp_path: Path, calm: str) -> None:
    with indexed_job(3, tmp_path, SCRIPT, environ=THREE) as pods:
        pass
    assert [pod.codes for pod in pods] == [[0], [0], [0]], [pod.output for pod in pods]
    assert digest_in(pods[0].output) == calm


def test_when_a_pod_is_lost_the_others_come_to_the_same_bits(tmp_path: Path, calm: str) -> None:
    with indexed_job(3, tmp_path, SCRIPT, "--wait-at", "12", environ=THREE, restarts=False) as pods:
        await_file(tmp_path / "reached")
        pods[1].kill()
        (tmp_path / "go").touch()
    assert [pod.codes for pod in pods] == [[0], [-9], [0]], [pod.output for pod in pods]
    assert digest_in(pods[0].output) == calm


@needs_roster
@pytest.mark.parametrize("lost", [0, 1])
def test_a_pod_that_is_started_again_joins_by_the_roster(lost: int, tmp_path: Path, calm: str) -> None:
    roster = {"LOCKSTEP_ROSTER": str(tmp_path / "roster"), "LOCKSTEP_SECRET": "pods"}
    with indexed_job(3, tmp_path, SCRIPT, "--kill", f"{lost}:12", "--pace-s", "1", environ={**THREE, **roster}) as pods:
        pass
    output = "".join(pod.output for pod in pods)
    assert [pod.codes[-1] for pod in pods] == [0, 0, 0], output
    assert len(pods[lost].codes) == 2, output
    assert digest_in(output) == calm
    assert f"+ worker {lost} is new" in output


@needs_roster
def test_pods_that_know_no_number_of_workers_find_each_other_by_the_roster(tmp_path: Path, calm: str) -> None:
    roster = {"LOCKSTEP_ROSTER": str(tmp_path / "roster"), "LOCKSTEP_SECRET": "pods"}
    with indexed_job(3, tmp_path, SCRIPT, "--pace-s", "1", environ=roster) as pods:
        pass
    output = "".join(pod.output for pod in pods)
    assert [pod.codes[-1] for pod in pods] == [0, 0, 0], output
    assert digest_in(output) == calm
    assert "3 workers now" in output
