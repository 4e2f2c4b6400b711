"""What the launcher's page shows of a worker, by its events: above all after a wait that failed."""

from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from lockstep.events import Events, LaneBegan, RecoveryBegan, StepBegan, StepCommitted, Wait, WaitBegan
from lockstep.launch.channels.status import Collective, Phase, StatusPage, StatusRow, StatusWriter
from lockstep.run.status_report import StatusReport

SLOT = 2


class Watched:
    """A worker's events, and its row of the page."""

    def __init__(self, page: StatusPage, writer: StatusWriter) -> None:
        self.events, self._page = Events(worker=SLOT), page
        StatusReport(writer, lambda: 0).read(self.events)

    @property
    def row(self) -> StatusRow:
        return self._page.row(SLOT)

    def place(self) -> tuple[int, int]:
        return self.row.phase, self.row.step

    def step(self, step: int) -> None:
        self.events.step = step
        self.events.emit(StepBegan)
        self.events.emit(LaneBegan, 0, trains=True)
        self.events.emit(WaitBegan, Wait.STEP, 0, 1)
        self.events.emit(StepCommitted, num_samples=8, loss=None)

    def fail_to_wait(self, wait: Wait) -> None:
        with suppress(ConnectionError), self.events.waiting(wait):
            raise ConnectionError("a worker was lost")


@pytest.fixture
def watched() -> Iterator[Watched]:
    with StatusPage() as page, closing(StatusWriter(page.fd, SLOT)) as writer:
        yield Watched(page, writer)


def test_a_step_passes_through_its_phases_and_ends_before_the_next_one(watched: Watched) -> None:
    watched.events.step = 4
    watched.events.emit(LaneBegan, 0, trains=True)
    assert watched.place() == (Phase.COMPUTING, 4)
    watched.events.emit(WaitBegan, Wait.STEP, 1, 3)
    assert (*watched.place(), watched.row.detail_a, watched.row.detail_b) == (Phase.REDUCING, 4, 1, 3)
    watched.events.emit(StepCommitted, num_samples=8, loss=None)
    assert watched.place() == (Phase.OUTSIDE, 5)


def test_a_wait_that_has_failed_is_shown_until_the_worker_does_something_else(watched: Watched) -> None:
    """The launcher reads there that a worker, which reports a failure next, has waited for the others."""
    watched.step(4)
    watched.fail_to_wait(Wait.TOTAL)
    assert (watched.row.phase, watched.row.detail_a) == (Phase.AWAITING, Collective.TOTAL)
    watched.events.emit(RecoveryBegan)
    assert watched.row.phase == Phase.RECOVERING


def test_the_end_of_a_wait_leads_back_to_where_the_worker_was_before_one_that_failed(watched: Watched) -> None:
    watched.step(4)
    watched.fail_to_wait(Wait.TOTAL)
    with watched.events.waiting(Wait.CHECKPOINTS):
        assert (watched.row.phase, watched.row.detail_a) == (Phase.AWAITING, Collective.CHECKPOINTS)
    assert watched.place() == (Phase.OUTSIDE, 5)


def test_several_waits_that_fail_one_after_the_other_leave_nothing_behind(watched: Watched) -> None:
    watched.step(4)
    for wait in (Wait.REPLICATE, Wait.RESUME, Wait.TOTAL):
        watched.fail_to_wait(wait)
    with watched.events.waiting(Wait.TOTAL):
        pass
    assert watched.place() == (Phase.OUTSIDE, 5)


def test_a_wait_that_failed_steps_ago_does_not_bring_its_step_back(watched: Watched) -> None:
    watched.step(4)
    watched.fail_to_wait(Wait.TOTAL)
    watched.step(5)
    with watched.events.waiting(Wait.TOTAL):
        assert watched.row.step == 6
    assert watched.place() == (Phase.OUTSIDE, 6)
