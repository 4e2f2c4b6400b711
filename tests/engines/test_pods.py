"""Pods that are played by machines: what an Indexed Job of Kubernetes comes to."""

from pathlib import Path

import pytest
from engine_runs import SCRIPT, await_file, await_that, digest_in
from pods import Pod, indexed_job

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


def output_of(pods: list[Pod]) -> str:
    return "".join(pod.output for pod in pods)


def await_words(pods: list[Pod], words: str) -> None:
    await_that(lambda: words in output_of(pods), lambda: f"nobody says {words!r}:\n{output_of(pods)}", limit_s=180)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_pod_that_is_started_again_joins_by_the_roster(lost: int, tmp_path: Path, calm: str) -> None:
    roster = {"LOCKSTEP_ROSTER": str(tmp_path / "roster"), "LOCKSTEP_SECRET": "pods"}
    with indexed_job(3, tmp_path, SCRIPT, "--kill", f"{lost}:12", "--pace-s", "5", environ={**THREE, **roster}) as pods:
        await_words(pods, f"+ worker {lost} is new")
        (tmp_path / "hurry").touch()
    output = output_of(pods)
    assert [pod.codes[-1] for pod in pods] == [0, 0, 0], output
    assert len(pods[lost].codes) == 2, output
    assert digest_in(output) == calm


def test_pods_that_know_no_number_of_workers_find_each_other_by_the_roster(tmp_path: Path, calm: str) -> None:
    roster = {"LOCKSTEP_ROSTER": str(tmp_path / "roster"), "LOCKSTEP_SECRET": "pods"}
    with indexed_job(3, tmp_path, SCRIPT, "--pace-s", "5", environ=roster) as pods:
        await_words(pods, "3 workers now")
        (tmp_path / "hurry").touch()
    output = output_of(pods)
    assert [pod.codes[-1] for pod in pods] == [0, 0, 0], output
    assert digest_in(output) == calm


def test_when_all_pods_are_lost_those_that_are_started_again_resume(tmp_path: Path, calm: str) -> None:
    with indexed_job(3, tmp_path, SCRIPT, "--kill", "all:12", environ=THREE) as pods:
        pass
    output = output_of(pods)
    assert [pod.codes for pod in pods] == [[137, 0]] * 3, output
    assert digest_in(output) == calm
    assert "begins at step 10" in output


def test_a_pod_that_is_told_to_end_leaves_and_one_that_is_started_again_joins(tmp_path: Path, calm: str) -> None:
    """An eviction: Kubernetes sends SIGTERM, and starts the index again, since it did not end with 0."""
    roster = {"LOCKSTEP_ROSTER": str(tmp_path / "roster"), "LOCKSTEP_SECRET": "pods"}
    result = ("--pace-s", "5", "--wait-at", "12")
    with indexed_job(3, tmp_path, SCRIPT, *result, environ={**THREE, **roster}) as pods:
        await_file(tmp_path / "reached")
        pods[1].tell()
        (tmp_path / "go").touch()
        await_words(pods, "- worker 1 is gone")
        await_words(pods, "+ worker 1 is new")
        (tmp_path / "hurry").touch()
    output = output_of(pods)
    assert [pod.codes for pod in pods] == [[0], [143, 0], [0]], output
    assert digest_in(output) == calm
