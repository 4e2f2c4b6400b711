"""What every pool of workers does. A new variant is a row in POOLS; the supervisor knows nothing else of it."""

import importlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest
from launches import FORKING
from ray_clusters import joined, needs_ray, ray_cluster

from lockstep.launch.host.signals import LauncherSignals
from lockstep.launch.job import Job
from lockstep.launch.pool import ExitStatus, OpenPool, WorkerEvent, WorkerPool
from lockstep.launch.pools import process
from lockstep.launch.pools.local_pool import LocalPool


@contextmanager
def local_pool() -> Iterator[OpenPool]:
    yield LocalPool


@contextmanager
def forking_pool() -> Iterator[OpenPool]:
    yield lambda job, *given: LocalPool(replace(job, load_once=True), *given)


@contextmanager
def ray_pool() -> Iterator[OpenPool]:
    with ray_cluster(4) as cluster, joined(cluster):
        pool = importlib.import_module("lockstep.launch.pools.ray_pool")
        yield pool.pool_for({})


LIMIT_S = 60.0
POOLS = {"local": local_pool, "local, loaded once": forking_pool, "ray": ray_pool}
"""Context managers that give what opens a pool."""
ENDPOINTS = ("127.0.0.1:41000",)

# A worker that does what its line in `orders-SLOT` says, and what comes there next. It stands on the status page.
PLAYER = """
import os, signal, subprocess, sys
from lockstep.launch.channels.failure import note_of
from lockstep.launch.channels.status import StatusWriter
notice_fd = int(os.environ["LOCKSTEP_NOTICE_FD"])
slot = int(os.environ["LOCKSTEP_SLOT"])
status = StatusWriter(int(os.environ["LOCKSTEP_STATUS_FD"]), slot)
status.place(1, slot, 3, 0, 1)
print(f"worker {slot} is here, endpoints {os.environ.get('LOCKSTEP_ENDPOINTS', 'none')}", flush=True)
while True:
    with open(f"{os.path.dirname(__file__)}/orders-{slot}") as orders:
        for line in orders: exec(line)
"""


@dataclass
class Stage:
    """A pool that is open, and what came out of it."""

    folder: Path
    pool: WorkerPool
    signals: LauncherSignals
    shown: bytearray
    said: list[str]
    events: list[WorkerEvent] = field(default_factory=list)

    def order(self, slot: int, line: str) -> None:
        with open(self.folder / f"orders-{slot}", "w") as orders:
            orders.write(line + "\n")

    def wait_until(self, reached: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not reached():
            assert time.monotonic() < deadline_s, f"never came: {self.events}, {self.said}, {bytes(self.shown)!r}"
            self.events += self.pool.wait(1.0)

    def log(self, slot: int) -> str:
        path = self.folder / f"worker-{slot}.log"
        return path.read_text() if path.exists() else ""

    def wait_for_words(self, slot: int, words: str) -> None:
        self.wait_until(lambda: f"{words}\n" in self.log(slot))

    def wait_for(self, slot: int, endpoints: str = "none") -> None:
        self.wait_for_words(slot, f"worker {slot} is here, endpoints {endpoints}")

    def start(self, num_workers: int) -> dict[int, str]:
        """The ids of workers that have all come."""
        self.pool.start(num_workers)
        for slot in range(num_workers):
            self.wait_for(slot)
        return dict(self.pool.running)

    def exits(self) -> dict[int, ExitStatus]:
        return {event.slot: event.status for event in self.events if event.status is not None}


@pytest.fixture(params=["local", "local, loaded once", pytest.param("ray", marks=needs_ray)], scope="module")
def open_pool(request: pytest.FixtureRequest) -> Iterator[OpenPool]:
    with POOLS[request.param]() as opened:
        yield opened


@pytest.fixture
def stage(open_pool: OpenPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(process, "subprocess", FORKING)
    (tmp_path / "play.py").write_text(PLAYER)
    for slot in range(4):
        os.mkfifo(tmp_path / f"orders-{slot}")
    shown, said = bytearray(), []
    job = Job(str(tmp_path / "play.py"), tmp_path, num_workers=3)
    with ExitStack() as opened:
        signals = opened.enter_context(LauncherSignals())
        pool = opened.enter_context(open_pool(job, shown.extend, said.append, signals))
        yield Stage(tmp_path, pool, signals, shown, said)


def test_started_workers_run_each_with_an_id_of_its_own_and_a_row(stage):
    ids = stage.start(3)
    assert sorted(ids) == [0, 1, 2]
    assert len(set(ids.values())) == 3
    assert sorted(stage.pool.rows()) == [0, 1, 2]
    assert [stage.pool.row(slot).rank for slot in range(3)] == [0, 1, 2]
    assert stage.events == []


def test_a_clean_exit_and_a_kill_are_each_reported_once_in_words_and_the_others_go_on(stage):
    ids = stage.start(3)
    stage.order(1, "sys.exit(0)")
    stage.pool.send(2, signal.SIGKILL)
    stage.wait_until(lambda: len(stage.exits()) == 2)
    assert stage.exits() == {1: ExitStatus("0"), 2: ExitStatus("SIGKILL", is_killed=True)}
    assert {event.slot: event.id for event in stage.events} == {1: ids[1], 2: ids[2]}
    assert stage.pool.running == {0: ids[0]}
    assert stage.pool.wait(0.0) == []


def test_an_exception_is_reported_with_its_place_and_the_exit_that_follows_with_its_code(stage):
    ids = stage.start(2)
    stage.order(1, "raise ValueError('bad sample')")
    stage.wait_until(lambda: 1 in stage.exits())
    reports = [event.report for event in stage.events if event.report is not None]
    assert {(report.worker_id, report.sentence) for report in reports} == {(ids[1], "ValueError: bad sample")}
    assert stage.exits() == {1: ExitStatus("1")}
    assert stage.events[0].report is not None, "the report comes before the exit, or with it"


def test_a_note_of_a_worker_whose_output_is_not_shown_is_said(stage):
    stage.start(2)
    for slot in (0, 1):
        stage.order(slot, f"os.write(notice_fd, note_of(f'pid {{os.getpid()}}', 'worker {slot} has\\n counted'))")
    stage.wait_until(lambda: stage.said)
    stage.order(1, "sys.exit(0)")
    stage.wait_until(lambda: 1 in stage.exits())
    assert stage.said == ["  note: worker 1: worker 1 has counted"]


def test_a_replacement_has_another_id_knows_the_endpoints_and_goes_on_in_the_log(stage):
    ids = stage.start(2)
    stage.pool.send(1, signal.SIGKILL)
    stage.wait_until(lambda: 1 in stage.exits())
    stage.pool.replace(1, ENDPOINTS, 2)
    stage.wait_for(1, endpoints="127.0.0.1:41000")
    assert stage.pool.running.keys() == {0, 1}
    assert stage.pool.running[1] != ids[1]
    assert "--- here another process takes over as this worker ---\n" in stage.log(1)


def test_what_runs_in_a_slot_is_killed_for_its_replacement_and_that_is_no_event(stage):
    ids = stage.start(2)
    stage.pool.replace(1, ENDPOINTS, 2)
    stage.wait_for(1, endpoints="127.0.0.1:41000")
    assert stage.pool.running[1] != ids[1]
    assert stage.exits() == {}


def test_a_worker_that_is_ended_dies_even_if_it_ignores_sigterm_with_what_it_has_started(stage):
    stage.start(2)
    stage.order(1, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    stage.order(1, "print('child', subprocess.Popen(['sleep', '1000']).pid, flush=True)")
    stage.wait_until(lambda: re.search(r"child \d+\n", stage.log(1)))
    child = psutil.Process(int(stage.log(1).split("child ")[1]))
    stage.pool.end(1)
    stage.wait_until(lambda: 1 in stage.exits())
    assert stage.exits() == {1: ExitStatus("SIGKILL", is_killed=True)}
    stage.wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_all_are_ended_without_an_event_and_may_be_started_again(stage):
    ids = stage.start(3)
    pids = [row.pid for row in stage.pool.rows().values()]
    stage.pool.end_all()
    assert stage.pool.running == {}
    assert stage.pool.wait(0.0) == []
    assert not any(map(psutil.pid_exists, pids))
    assert not set(stage.start(2).values()) & set(ids.values())
    stage.wait_until(lambda: all(slot in stage.pool.rows() for slot in (0, 1)))
    assert not {stage.pool.row(slot).pid for slot in (0, 1)} & set(pids)


def test_the_output_of_the_member_with_rank_0_is_shown_and_everybodys_is_in_the_logs(stage):
    stage.start(2)
    for slot in (1, 0):
        stage.order(slot, f"print('words of {slot}', flush=True)")
        stage.wait_for_words(slot, f"words of {slot}")
    assert b"words of 0\n" in stage.shown
    assert b"words of 1\n" not in stage.shown


def test_a_signal_to_the_launcher_ends_a_wait_without_an_event(stage):
    stage.start(1)
    began_s = time.monotonic()
    stage.signals.add(signal.SIGTERM)
    assert stage.pool.wait(LIMIT_S) == []
    assert time.monotonic() - began_s < LIMIT_S / 2
    assert stage.signals.take() == [signal.SIGTERM]


def test_a_worker_can_be_asked_where_it_is_and_what_it_has_done(stage):
    stage.start(2)
    assert stage.pool.state(1) in ("", "R", "S")
    done = stage.pool.activity(1)
    assert done is None or done.processes
    query = stage.pool.ask_stack(1)
    if query is not None:
        stage.wait_until(query.answer)
        assert query.answer().file.endswith("play.py")


DEAF = """
import faulthandler; faulthandler.unregister(signal.SIGUSR2); signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print('deaf', flush=True); signal.sigwait([signal.SIGTERM]); print('alive', flush=True)
"""


def test_a_worker_that_cannot_answer_yet_is_not_disturbed_by_a_question(stage):
    stage.start(2)
    stage.order(1, DEAF)
    stage.wait_for_words(1, "deaf")
    stage.pool.ask_stack(1)
    stage.pool.send(1, signal.SIGTERM)
    stage.wait_for_words(1, "alive")


def test_a_slot_that_is_given_up_is_known_to_the_workers_but_not_while_one_runs_there(stage):
    stage.start(2)
    stage.pool.give_up(0)
    stage.pool.give_up(3)
    for slot in (0, 3):
        stage.order(1, f"print('given up', {slot}, status.is_given_up({slot}), flush=True)")
        stage.wait_for_words(1, f"given up {slot} {slot == 3}")


def test_a_signal_reaches_its_worker_whatever_the_thread_that_started_it_had_blocked(stage):
    stage.start(3)
    stage.pool.send(1, signal.SIGINT)
    stage.pool.send(2, signal.SIGTERM)
    stage.wait_until(lambda: len(stage.exits()) == 2)
    assert stage.exits() == {1: ExitStatus("130"), 2: ExitStatus("SIGTERM", is_killed=True)}


def test_a_worker_that_has_ended_can_be_sent_signals_and_ended(stage):
    stage.start(2)
    stage.order(1, "sys.exit(0)")
    stage.wait_until(lambda: 1 in stage.exits())
    stage.pool.send(1, signal.SIGTERM)
    stage.pool.end(1)
    stage.pool.keep_spares(0)
    assert stage.pool.running.keys() == {0}
