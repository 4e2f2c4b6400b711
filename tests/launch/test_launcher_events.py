"""The launcher's events, as a reader of one's own receives them from real launches; its lines are made of them."""

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from launches import FORKING

from lockstep.events import Event
from lockstep.launch.events import (
    LAUNCHER,
    CatchUpFound,
    LateFound,
    LaunchEnded,
    MemberLost,
    RunFailed,
    RunInterrupted,
    SlowFound,
    WorkerExited,
    WorkersSeen,
    WorkerStarted,
)
from lockstep.launch.job import Job
from lockstep.launch.launch import LaunchOutcome, launch
from lockstep.launch.pools import process
from lockstep.launch.supervision.messages import message

# Worker 1 kills itself after its third step, once; the others wait for the worker that takes its place.
LOSING = """
import os, select, signal
import torch
import lockstep

run = lockstep.start(lanes=4)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.replicate(model, optimizer)
while run.step < 300:
    for x in run.lanes(torch.ones(8, 4)):
        model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if run.step == 3 and run._events.worker == 1 and not os.path.exists("lost"):
        open("lost", "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if run.size == 1:
        select.select([], [], [], 0.3)  # until the other is there
"""

RAISING = """
import lockstep
run = lockstep.start()
if run.rank == 1:
    raise ValueError("bad sample 7")
run.total(1)
"""


@dataclass
class Observed:
    """What came of a launch of two workers: its events, what it said, and what `message` makes of each event."""

    outcome: LaunchOutcome | None = None
    events: list[Any] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self.read += [text] if (text := message(event)) else []

    def kinds(self, *left_out: type[Event]) -> list[str]:
        return [type(event).__name__ for event in self.events if not isinstance(event, left_out)]

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def observe(folder: Path, script: str, on_event: Any = lambda event: None) -> Observed:
    """Launches the script in `folder`. Workers are forked from this process, which has torch."""
    observed = Observed()
    (folder / "train.py").write_text(script)
    job = Job("train.py", folder, num_workers=2, copies=False, fault_budget=8)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(process, "subprocess", FORKING)
        said = observed.said.append
        observed.outcome = launch(job, show=lambda output: None, say=said, readers=[observed, on_event])
    return observed


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return observe(tmp_path_factory.mktemp("lost"), LOSING)


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return observe(tmp_path_factory.mktemp("raised"), RAISING)


def test_a_worker_that_is_lost_and_replaced_is_an_event_at_each_turn_with_its_slot_and_step(lost: Observed) -> None:
    assert lost.kinds(LateFound, SlowFound, CatchUpFound, WorkersSeen) == [
        "LaunchBegan", "WorkerStarted", "WorkerStarted", "WorkerExited", "MemberLost", "WorkerStarted",
        "WorkerExited", "WorkerExited", "LaunchEnded",
    ]  # fmt: skip
    assert [(event.worker, event.joins, event.replaces) for event in lost.of(WorkerStarted)] == [
        (0, False, False), (1, False, False), (1, True, True),
    ]  # fmt: skip
    killed, *finished = lost.of(WorkerExited)
    assert (killed.worker, killed.step, killed.status, killed.is_killed) == (1, 3, "SIGKILL", True)
    assert sorted((event.worker, event.step, event.status) for event in finished) == [(0, 300, "0"), (1, 300, "0")]
    (loss,), (end,) = lost.of(MemberLost), lost.of(LaunchEnded)
    assert (loss.worker, loss.step, loss.failure.kind) == (1, 3, "SIGKILL")
    assert (end.worker, end.step, end.exit_code) == (LAUNCHER, 300, 0)


def test_every_event_has_its_time(lost: Observed) -> None:
    times_s = [event.time_s for event in lost.events]
    assert times_s == sorted(times_s)
    assert times_s[0] > 0


def test_an_error_in_the_script_is_one_event_with_the_failure_the_launch_ends_with(raised: Observed) -> None:
    (failed,), (end,) = raised.of(RunFailed), raised.of(LaunchEnded)
    assert (failed.worker, failed.failure, failed.num_well) == (1, raised.outcome.failure, 1)
    assert failed.failure.message == "bad sample 7"
    assert end.exit_code == raised.outcome.exit_code != 0


def test_a_signal_to_the_launcher_is_an_event_with_its_name(tmp_path: Path) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, WorkerStarted) and event.worker == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    seen = observe(tmp_path, "import signal\nsignal.pause()\n", interrupt)
    assert seen.kinds(WorkerExited, WorkersSeen) == [
        "LaunchBegan", "WorkerStarted", "WorkerStarted", "RunInterrupted", "LaunchEnded",
    ]  # fmt: skip
    assert [event.signal for event in seen.of(RunInterrupted)] == ["SIGTERM"]


def test_all_that_the_launcher_says_is_made_of_its_events(lost: Observed, raised: Observed) -> None:
    assert (lost.said, raised.said) == (lost.read, raised.read)
    assert any("was killed by SIGKILL at step 3" in text for text in lost.said)
    assert raised.said[-1].startswith("✗ worker 1 failed at step 0: ValueError: bad sample 7\n")
