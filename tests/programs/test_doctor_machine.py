"""How the doctor looks at a machine: at real files, real processes, real folders."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.launch.scale import registered
from lockstep.programs.doctor import machine
from lockstep.programs.doctor.leftovers import dead_runs, find_orphans, partial_checkpoints, torch_files


def test_a_folder_for_runs_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    assert machine.disk(tmp_path / "runs" / "deep")["folder"] == str(tmp_path)


def test_interfaces_that_gloo_is_told_are_read_from_the_variable() -> None:
    assert machine.gloo_interfaces({"GLOO_SOCKET_IFNAME": "eth0, ib0,"}) == ("eth0", "ib0")


BECOME_A_WORKER = """
import os, sys
print(flush=True)
environ = {"LOCKSTEP_LAUNCHER": "lockstep run", "LOCKSTEP_PARENT_PID": input()}
os.execve(sys.executable, [sys.executable, "-c", "print(flush=True); input()"], environ)
"""


class Started:
    """A process that turns into a worker of whatever launcher it is told."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", BECOME_A_WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._await_line()

    def become_worker_of(self, launcher_pid: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{launcher_pid}\n")
        self._await_line()

    def _await_line(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "\n"


@pytest.fixture
def worker() -> Iterator[Started]:
    started = Started()
    with started.process:
        yield started
        started.process.kill()


def orphans() -> list[int]:
    found = find_orphans()
    assert found is not None
    return [orphan.pid for orphan in found]


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_worker_whose_launcher_lives_is_no_orphan(worker: Started) -> None:
    worker.become_worker_of(os.getpid())
    assert worker.process.pid not in orphans()


def test_a_worker_whose_launcher_has_ended_is_an_orphan(worker: Started) -> None:
    worker.become_worker_of(ended_pid())
    assert worker.process.pid in orphans()


def test_a_younger_process_with_the_number_of_the_launcher_is_not_the_launcher(worker: Started) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as younger:
        worker.become_worker_of(younger.pid)
        found = orphans()
        younger.kill()
    assert worker.process.pid in found


def test_a_run_is_dead_when_its_card_names_nobody(tmp_path: Path) -> None:
    for name, pid in (("alive", None), ("dead", ended_pid())):
        (tmp_path / name).mkdir()
        if pid is not None:
            (tmp_path / name / "launcher.json").write_text(json.dumps({"pid": pid, "start_time": 1}))
    with registered(tmp_path / "alive", print):
        assert dead_runs(tmp_path) == (str(tmp_path / "dead"),)


def test_a_half_written_checkpoint_is_left_over_unless_its_writer_holds_it(tmp_path: Path) -> None:
    for name in ("held", "left"):
        folder = tmp_path / "train-1" / "checkpoints" / f".{name}.partial"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    with open(tmp_path / "train-1" / "checkpoints" / ".held.partial" / "manifest.json") as manifest:
        fcntl.flock(manifest, fcntl.LOCK_EX)
        assert partial_checkpoints(tmp_path) == (str(tmp_path / "train-1" / "checkpoints" / ".left.partial"),)


def test_shared_files_of_torch_are_left_over_when_their_process_has_ended(tmp_path: Path) -> None:
    dead = tmp_path / f"torch_{ended_pid()}_123_0"
    for file in (dead, tmp_path / f"torch_{os.getpid()}_123_0", tmp_path / "torch_of_somebody", tmp_path / "other"):
        file.touch()
    assert torch_files(tmp_path) == (dead,)


def test_without_a_folder_for_shared_memory_nothing_is_known_of_it(tmp_path: Path) -> None:
    assert torch_files(tmp_path / "shm") is None
