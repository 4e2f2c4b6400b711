"""Real workers of which one is slow: it is named with its cause, nobody is ended, and the bits are the same.

In the short tests time is logical: it passes where a worker is told to take its time, and while it waits for another;
the watchdog looks once after every step. Those marked `soak` are whole launches, on the real clock.
"""

import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from training import Job, data, make
from workers import _place as take_place
from workers import all_values, fork, gather, on_workers

import lockstep
from lockstep.data import loader
from lockstep.launch.channels import status
from lockstep.launch.channels.status import Phase, StatusPage, StatusWriter
from lockstep.launch.supervision.messages import LauncherConsole
from lockstep.launch.supervision.stragglers import StragglerDetector
from lockstep.launch.supervision.watchdog import Watchdog
from lockstep.settings.environments.lockstep_run import SLOT, STATUS_FD

pytestmark = pytest.mark.timeout(170)

CAUSES = ["data", "compute", "other"]
LIMIT_S = 45.0
PAUSE_S = 0.03
"""How much longer the slow worker takes for a step."""
LANE_S = PAUSE_S / 4
NUM_WORKERS, MOST_STEPS = 3, 100


class RealClock:
    """How a worker takes its time in the whole launches."""

    def pause(self, seconds: float) -> None:
        if seconds:
            select.select([], [], [], seconds)

    def burn(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            pass


class LogicalClock(RealClock):
    """The clock of one worker, in the place of `time` where the worker measures itself.

    When a worker has waited for a step it is as late as it was for the last of the workers when it began to wait;
    `arrivals`, in memory that all workers share, has that moment of every worker and step.
    """

    def __init__(self, slot: int, arrivals: torch.Tensor) -> None:
        self._slot, self._arrivals, self._now_ns = slot, arrivals, 1

    def monotonic_ns(self) -> int:
        return self._now_ns

    def pause(self, seconds: float) -> None:
        self._now_ns += int(seconds * 1e9)

    burn = pause

    def arrives(self, step: int) -> None:
        if self._arrivals[step, self._slot] == 0:
            self._arrivals[step, self._slot] = self._now_ns

    def has_met_all(self, step: int) -> None:
        assert self._arrivals[step].all(), "a step was committed that somebody has not reached"
        self._now_ns = max(self._now_ns, int(self._arrivals[step].max()))

    def install(self) -> None:
        """In this process, time is this clock's."""
        global clock
        clock = self
        status.time = loader.time = self  # type: ignore[assignment]
        enter = StatusWriter.enter

        def arriving(writer: StatusWriter, phase: int, step: int, *place: int) -> None:
            if phase == Phase.REDUCING:
                self.arrives(step)
            elif phase == Phase.OUTSIDE and step > 0:
                self.has_met_all(step - 1)
            enter(writer, phase, step, *place)

        StatusWriter.enter = arriving  # type: ignore[method-assign,assignment]


clock = RealClock()


class Slowed(TensorDataset):
    """A data set that takes its time, once in each batch or so."""

    pause_s = 0.0

    def __getitem__(self, index: int) -> tuple:
        clock.pause(self.pause_s / 16)  # the samples of a worker in a batch of 52, cut into 6 lanes for 3 workers
        return super().__getitem__(index)


def train(epochs: int, slow_in: str = "", lane_s: float = LANE_S, after_step: Callable[[], None] = lambda: None) -> str:
    """Trains 4 steps an epoch; gives the digest. Every lane takes `lane_s` longer than it needs."""
    job = Job(model="dropout")
    run = lockstep.start(lanes=6, seed=3)
    model, optimizer = make(job)
    run.replicate(model, optimizer)
    samples = Slowed(*data())
    samples.pause_s = PAUSE_S if slow_in == "data" else 0.0
    batches = run.shard(DataLoader(samples, batch_size=job.batch, shuffle=True))
    for _ in run.epochs(epochs):
        for batch in batches:
            for x, y in run.lanes(batch):
                clock.pause(lane_s)
                clock.burn(PAUSE_S / 2 if slow_in == "compute" else 0.0)
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.pause(PAUSE_S if slow_in == "other" else 0.0)
            after_step()
    return run.digest()


class Turns:
    """The first worker makes a step, then the watchdog looks, and so on."""

    def __enter__(self) -> "Turns":
        self._here, self._there = socket.socketpair()
        return self

    def __exit__(self, *_: object) -> None:
        self._here.close()

    def taken_by_worker(self) -> None:
        self._here.close()

    def left_to_worker(self) -> None:
        self._there.close()

    def step(self) -> None:
        """In the worker: returns when it was looked at the step."""
        self._there.send(b".")
        self._there.recv(1)

    def stepped(self) -> bool:
        """Whether there was another step; False when the worker has ended."""
        return bool(self._here.recv(1))

    def looked(self) -> None:
        self._here.send(b".")


def founders(
    page: StatusPage, epochs: int, slow_in: str, arrivals: torch.Tensor, turns: Turns
) -> list[tuple[int, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        forked = [
            fork(
                partial(stand, slot, listener, page, LogicalClock(slot, arrivals), turns),
                LIMIT_S,
                train,
                (epochs, slow_in if slot == 1 else ""),
                {"after_step": turns.step} if slot == 0 else {},
            )
            for slot in range(NUM_WORKERS)
        ]
    turns.left_to_worker()
    return forked


def stand(slot: int, listener: socket.socket, page: StatusPage, own: LogicalClock, turns: Turns) -> None:
    take_place(slot, NUM_WORKERS, listener)
    os.environ |= {SLOT: str(slot), STATUS_FD: str(page.fd)}
    own.install()
    turns.taken_by_worker()
    if slot > 0:
        turns.left_to_worker()


def watched(epochs: int, slow_in: str = "", window_steps: int = 10) -> tuple[list[str], list[str]]:
    """Trains on three workers, of which worker 1 may be slow; gives their digests, and what the watchdog said."""
    said: list[str] = []
    arrivals = torch.zeros(MOST_STEPS, NUM_WORKERS, dtype=torch.int64).share_memory_()
    with StatusPage() as page, Turns() as turns:
        workers = founders(page, epochs, slow_in, arrivals, turns)
        running = {slot: f"pid {pid}" for slot, (pid, _) in enumerate(workers)}
        pool = SimpleNamespace(running=running, row=page.row, state=lambda slot: "R", activity=lambda slot: None)
        watchdog = Watchdog(pool, LauncherConsole(said.append), StragglerDetector(window_steps, window_s=0.2))
        try:
            while turns.stepped():
                now_s = max(page.row(slot).committed_ns for slot in range(NUM_WORKERS)) / 1e9
                assert watchdog.look(now_s) == []
                turns.looked()
        finally:
            outcomes = gather(workers, LIMIT_S)
    return all_values(outcomes), said


@pytest.fixture(scope="module")
def undisturbed():
    return on_workers(1, train, 15, lane_s=0.0)[0]


@pytest.mark.parametrize("cause", CAUSES)
def test_a_slow_worker_is_named_with_its_cause_and_the_bits_stay_the_same(cause, undisturbed):
    digests, said = watched(15, slow_in=cause)
    (result,) = said
    assert re.match(rf"! worker 1 is slow: [\d.]+ times the others for \d+ steps, in {cause} \(", result)
    assert digests == [undisturbed] * 3


def test_a_run_without_a_slow_worker_says_nothing(undisturbed):
    digests, said = watched(15)
    assert said == []
    assert digests == [undisturbed] * 3


# -- whole launches ------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys
sys.path[:0] = {paths!r}
import test_slow
slow = os.environ["LOCKSTEP_SLOT"] == "1"
print("digest", test_slow.train({epochs}, {cause!r} if slow else "", test_slow.PAUSE_S / 4), flush=True)
"""
TESTS = Path(__file__).parents[1]
COMMAND = [sys.executable, "-c", "import sys; sys.argv[0] = 'lockstep'; from lockstep.cli.main import main; main()"]


def launch(folder: Path, epochs: int, cause: str) -> str:
    """All that a launch of three workers shows."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(paths=[str(TESTS), str(TESTS / "recovery")], epochs=epochs, cause=cause))
    shown = subprocess.run(
        [*COMMAND, "run", "-n", "3", "--no-rebalance", str(script)],  # else lanes move before anybody is named
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(TESTS.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=160,
        check=True,
    )
    return shown.stdout


@pytest.mark.soak
@pytest.mark.parametrize("cause", ["", *CAUSES])
def test_a_launch_tells_of_its_slow_worker_alone(tmp_path, cause):
    shown = launch(tmp_path, 150, cause)
    assert f"digest {on_workers(1, train, 150, lane_s=0.0)[0]}\n" in shown
    warnings = [line for line in shown.splitlines() if line.startswith("!")]
    if cause:
        (result,) = warnings
        assert re.match(rf"! worker 1 is slow: [\d.]+ times the others for \d+ steps, in {cause} \(", result)
    else:
        assert warnings == []
