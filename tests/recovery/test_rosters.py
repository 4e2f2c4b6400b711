"""Workers that nobody launches find one another by a roster: they train to the same bits."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from launches import IMPORTABLE, LIMIT_S, REPOSITORY, Forked
from rostered import BEYOND

from lockstep.elastic.roster.tcp import RosterServer

pytestmark = pytest.mark.timeout(170)

WORKER = "rostered"
NUM_STRANGERS = 200


class Stage:
    """A folder in which workers train, and the workers."""

    def __init__(self, folder: Path, roster: str, **variables: str) -> None:
        self.folder, self.roster, self.variables = folder, roster, variables
        self.workers: list[subprocess.Popen[str]] = []

    def start(self, slot: int, *, checkpoints: bool = False, **variables: str) -> "subprocess.Popen[str]":
        words = [sys.executable, "-m", WORKER, str(self.folder)]
        words += [str(self.folder / "checkpoints")] if checkpoints else []
        path = os.pathsep.join([IMPORTABLE, str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "recovery")])
        environment = {"PYTHONPATH": path, "LOCKSTEP_SLOT": str(slot), "OMP_NUM_THREADS": "1"}
        environment |= {"LOCKSTEP_ROSTER": self.roster} if self.roster else {}
        worker = Forked(
            words,
            cwd=self.folder,
            env={**os.environ, **environment, **self.variables, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.workers.append(worker)
        return worker

    def where(self, slot: int) -> tuple[int, int]:
        """The step of a worker and how many it sees; zeros before its first step."""
        path = self.folder / f"at-{slot}"
        step, size = map(int, path.read_text().split()) if path.exists() else (0, 0)
        return step, size

    def until(self, reached: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not reached():
            if time.monotonic() > until_s:
                pytest.fail(f"never {what}: {self.ended()}")
            time.sleep(0.02)

    def until_size(self, slot: int, size: int) -> None:
        self.until(lambda: self.where(slot)[1] == size, f"were {size} workers, as worker {slot} sees it")

    def forget(self, slot: int) -> None:
        (self.folder / f"at-{slot}").unlink(missing_ok=True)

    def stop(self) -> int:
        """Ends the training soon, at a step that is given back."""
        last = max(self.where(slot)[0] for slot in range(8)) + BEYOND
        (self.folder / "stop.new").write_text(str(last))
        (self.folder / "stop.new").rename(self.folder / "stop")
        return last

    def ended(self) -> list[tuple[int | None, str]]:
        found = []
        for worker in self.workers:
            with suppress(subprocess.TimeoutExpired):
                worker.wait(LIMIT_S if (self.folder / "stop").exists() else 0.1)
            alive = worker.poll() is None
            found.append(
                (worker.poll(), "" if alive or worker.stdout is None or worker.stdout.closed else worker.stdout.read())
            )
        return found

    def digest(self, slot: int) -> str:
        return (self.folder / f"digest-{slot}").read_text()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()


@pytest.fixture(params=["folder", "tcp"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    secret, server = "of this run", None
    if request.param == "tcp":
        server = RosterServer("127.0.0.1", 0, secret.encode())
        stage = Stage(tmp_path, f"tcp://127.0.0.1:{server.port}", LOCKSTEP_SECRET=secret)
    else:
        stage = Stage(tmp_path, str(tmp_path / "roster"))
    try:
        yield stage
    finally:
        stage.close()
        if server is not None:
            server.close()


def alone(folder: Path, step: int) -> str:
    """The digest of one worker that trains to the step, and knows of no roster."""
    folder.mkdir()
    (folder / "stop").write_text(str(step))
    stage = Stage(folder, "")
    try:
        stage.start(0)
        assert stage.ended()[0][0] == 0
        return stage.digest(0)
    finally:
        stage.close()


def test_workers_found_join_die_and_come_back_to_the_bits_of_one(stage: Stage, tmp_path: Path) -> None:
    founder = stage.start(0)
    stage.until_size(0, 1)
    stage.start(2)
    stage.until_size(0, 2)
    stage.start(1)
    stage.until_size(2, 3)
    founder.kill()  # the founder, worker 0, and the coordinator
    stage.until_size(2, 2)
    stage.forget(0)
    stage.start(0)  # the first worker comes back: it joins, and does not found another run
    stage.until_size(0, 3)
    last = stage.stop()
    codes = [code for code, _ in stage.ended()]
    assert codes == [-signal.SIGKILL, 0, 0, 0]
    assert {stage.digest(slot) for slot in range(3)} == {alone(tmp_path / "alone", last)}
    late = stage.start(1)
    text, _ = late.communicate(timeout=LIMIT_S)
    assert late.returncode == 0
    assert f"is over: it ended after step {last}" in text
    assert "Traceback" not in text


def test_workers_that_start_together_found_one_run(stage: Stage, tmp_path: Path) -> None:
    for slot in range(3):
        stage.start(slot)
    for slot in range(3):
        stage.until_size(slot, 3)
    last = stage.stop()
    assert [code for code, _ in stage.ended()] == [0, 0, 0]
    assert {stage.digest(slot) for slot in range(3)} == {alone(tmp_path / "alone", last)}


def test_all_are_killed_and_the_next_ones_resume(stage: Stage, tmp_path: Path) -> None:
    for slot in range(2):
        stage.start(slot, checkpoints=True)
    stage.until(lambda: stage.where(1)[0] > 12, "came to step 12")
    stage.until(lambda: any((stage.folder / "checkpoints").glob("step-*")), "saved a checkpoint")
    for worker in stage.workers:
        worker.kill()
        worker.wait()
    for slot in range(2):
        stage.forget(slot)
    stage.start(1, checkpoints=True)  # the roster is full of the dead
    stage.start(2, checkpoints=True)
    for slot in (1, 2):
        stage.until_size(slot, 2)
    assert stage.where(1)[0] > 5, "it began anew"
    last = stage.stop()
    assert [code for code, _ in stage.ended()] == [-signal.SIGKILL, -signal.SIGKILL, 0, 0]
    assert {stage.digest(slot) for slot in (1, 2)} == {alone(tmp_path / "alone", last)}


def test_a_worker_of_another_run_is_turned_away_by_name(tmp_path: Path) -> None:
    stage = Stage(tmp_path, str(tmp_path / "roster"))
    try:
        stage.start(0)
        stage.until_size(0, 1)
        stranger = stage.start(1, LOCKSTEP_SECRET="of another run", PATIENCE_S="1")
        text, _ = stranger.communicate(timeout=LIMIT_S)
        assert stranger.returncode not in (0, None)
        assert "secret" in text
        assert stage.where(0)[1] == 1
        stage.stop()
        assert stage.ended()[0][0] == 0
    finally:
        stage.close()


def test_noise_at_every_port_changes_nothing(tmp_path: Path) -> None:
    stage = Stage(tmp_path, str(tmp_path / "roster"))
    sent = 0
    try:
        for slot in range(3):
            stage.start(slot)
        for slot in range(3):
            stage.until_size(slot, 3)
        ports = {
            connection.laddr
            for worker in stage.workers
            for connection in psutil.Process(worker.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert len(ports) >= 3
        noise, first = random.Random(0), stage.where(0)[0]
        while sent < NUM_STRANGERS or stage.where(0)[0] < first + 10:
            assert stage.workers[0].poll() is None, "training stood still"
            for address in ports:
                host = "127.0.0.1" if address.ip in ("0.0.0.0", "::") else address.ip
                with suppress(OSError), socket.create_connection((host, address.port), 1.0) as stranger:
                    stranger.sendall(
                        noise.choice([b"", b"lockstep/1\n", b"\0" * 8]) + noise.randbytes(noise.randrange(2000))
                    )
                    sent += 1
        assert stage.where(0)[1] == 3
        last = stage.stop()
        assert [code for code, _ in stage.ended()] == [0, 0, 0]
        assert {stage.digest(slot) for slot in range(3)} == {alone(tmp_path / "alone", last)}
    finally:
        stage.close()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"LOCKSTEP_SLOT": ""}, "LOCKSTEP_SLOT"),
        ({"LOCKSTEP_ROSTER": "/proc/nowhere/roster"}, "/proc/nowhere"),
        ({"LOCKSTEP_ROSTER": "tcp://127.0.0.1:1"}, "cannot be reached"),
        ({"LOCKSTEP_ADDRESS": "localhost"}, "which other hosts cannot reach"),
        ({"LOCKSTEP_ADDRESS": "nobody.invalid"}, "LOCKSTEP_ADDRESS=nobody.invalid"),
        ({"LOCKSTEP_LANES": "", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
          "TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence_within_ten_seconds(tmp_path: Path, variables: dict[str, str], words: str) -> None:
    stage = Stage(tmp_path, str(tmp_path / "roster"))
    try:
        began_s = time.monotonic()
        worker = stage.start(0, **variables)
        text, _ = worker.communicate(timeout=LIMIT_S)
        assert worker.returncode not in (0, None)
        assert words in text
        assert time.monotonic() - began_s < 30  # ten, and a machine that does other things too
    finally:
        stage.close()


@pytest.mark.parametrize(
    ("slot", "variables", "words"),
    [
        (0, {}, "there is a worker 0 already, at 1"),
        (1, {"OTHER_VERSION": "0.0.7"}, "version of lockstep: worker 0 has 0.0.7"),
    ],
    ids=["another run with the same roster", "a worker of another version"],
)
def test_who_cannot_join_a_run_says_why_within_ten_seconds(
    slot: int, variables: dict[str, str], words: str, tmp_path: Path
) -> None:
    stage = Stage(tmp_path, str(tmp_path / "roster"))
    try:
        stage.start(0)
        stage.until_size(0, 1)
        began_s = time.monotonic()
        stranger = stage.start(slot, **variables)
        text, _ = stranger.communicate(timeout=LIMIT_S)
        assert stranger.returncode not in (0, None)
        assert words in text
        assert time.monotonic() - began_s < 30  # ten, and a machine that does other things too
        assert stage.where(0)[1] == 1
        stage.stop()
        assert stage.ended()[0][0] == 0
    finally:
        stage.close()


def test_workers_whose_clocks_differ_by_an_hour_train_to_the_same_bits(tmp_path: Path) -> None:
    stage = Stage(tmp_path, str(tmp_path / "roster"))
    try:
        stage.start(0)
        stage.until_size(0, 1)
        stage.start(1, CLOCK_AHEAD_S="3600")
        stage.start(2, CLOCK_AHEAD_S="-3600")
        stage.until_size(2, 3)
        stage.until_size(1, 3)
        last = stage.stop()
        assert [code for code, _ in stage.ended()] == [0, 0, 0]
        assert {stage.digest(slot) for slot in range(3)} == {alone(tmp_path / "alone", last)}
    finally:
        stage.close()
