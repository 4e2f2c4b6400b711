"""Every place where a run waits for all its workers shows on the status page, as long as one is missing."""

import os
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from workers import on_workers

import lockstep
from lockstep.errors import BadArgument
from lockstep.launch.channels.status import Collective, Phase, StatusPage, StatusReader
from lockstep.settings.environments.lockstep_run import RANK, SLOT, STATUS_FD


class Page:
    """Worker 1's view of worker 0."""

    def __init__(self, fd: int) -> None:
        self.is_late = os.environ[RANK] == "1"
        self._reader = StatusReader(fd)

    def comes_late_to(self, phase: Phase, call: int = 0) -> None:
        """On worker 1: returns when worker 0 waits in this place."""
        while self.is_late:
            row = self._reader.rows().get(0)
            if row is not None and (row.phase, row.detail_a) == (phase, call):
                return


def _train(fd: int, folder: str) -> list[int]:
    os.environ |= {STATUS_FD: str(fd), SLOT: os.environ[RANK]}
    page = Page(fd)
    page.comes_late_to(Phase.AWAITING, Collective.START)
    run = lockstep.start(lanes=2)
    model = lockstep.sync_batchnorm(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    page.comes_late_to(Phase.AWAITING, Collective.REPLICATE)
    run.replicate(model, optimizer)
    page.comes_late_to(Phase.AWAITING, Collective.CHECKPOINTS)
    run.checkpoints(Path(folder, "checkpoints"), resume="never")
    run.save(Path(folder, "saved"))
    for x, y in run.lanes((torch.rand(8, 2), torch.zeros(8, dtype=torch.long))):
        page.comes_late_to(Phase.AWAITING, Collective.STATISTICS)
        F.cross_entropy(model(x), y).backward()
        page.comes_late_to(Phase.REDUCING)
    optimizer.step()
    page.comes_late_to(Phase.AWAITING, Collective.TOTAL)
    run.total(1)
    page.comes_late_to(Phase.AWAITING, Collective.RESUME)
    step = run.resume(Path(folder, "saved"))
    with closing(StatusReader(fd)) as reader:
        phase = reader.rows()[int(os.environ[RANK])].phase
    page.comes_late_to(Phase.AWAITING, Collective.END)
    run.close()
    return [step, phase]


def test_every_call_that_waits_for_all_workers_says_so_on_the_page_while_one_is_missing(tmp_path):
    with StatusPage() as page:
        assert on_workers(2, _train, page.fd, str(tmp_path)) == [[0, Phase.OUTSIDE]] * 2
        assert page.row(0).phase == Phase.ENDED


def _be_patient(fd: int) -> bool:
    os.environ |= {STATUS_FD: str(fd), SLOT: os.environ[RANK]}
    with lockstep.start() as run, run.patience(minutes=30), closing(StatusReader(fd)) as reader:
        until_ns = reader.rows()[0].patient_until_ns
    with run.patience(minutes=30):
        pass
    return 29 * 60e9 < until_ns - time.monotonic_ns() <= 30 * 60e9


def test_patience_shows_on_the_page_and_does_no_harm_after_the_run_or_without_a_launcher():
    with StatusPage() as page:
        assert on_workers(1, _be_patient, page.fd) == [True]
    with lockstep.start() as run, run.patience(minutes=0.5):
        assert run.size == 1


@pytest.mark.parametrize("minutes", [0, -1, float("nan"), 10**30, "30", None])
def test_patience_is_a_number_of_minutes(minutes):
    with lockstep.start() as run, pytest.raises(BadArgument, match="patience takes minutes"):
        run.patience(minutes).__enter__()
