"""Workers that hang where no launcher watches: the others say so, and end with the name."""

import io
import os
import signal
import time
from contextlib import redirect_stderr

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from workers import outcomes

import lockstep
from lockstep.errors import WorkerLost
from lockstep.launch.channels.status import Collective, Phase
from lockstep.run import wait_watch as waiting
from lockstep.run.wait_watch import LONG_S, LookedAtWait, WaitWatch, _reports, report_of
from lockstep.world import World

TIMEOUT_S = 1.5


def hang() -> None:
    """Until the others have given up, and longer."""
    time.sleep(3 * TIMEOUT_S)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(where: str, guilty: int) -> str:
    """A worker that sleeps for ever in one place, and others that wait for it; gives what was said."""
    waiting.LONG_S, waiting.LOOK_S = 0.2, 0.05
    said = io.StringIO()
    run = lockstep.start(lanes=6, timeout_s=TIMEOUT_S)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rank = run.rank
    try:
        with redirect_stderr(said):
            if where == "replicate" and rank == guilty:
                hang()
            run.replicate(model, optimizer)
            for batch in run.shard(DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=12)):
                for (x,) in run.lanes(batch):
                    if where == "lane" and run.step == 1 and rank == guilty:
                        hang()
                    model(x).pow(2).mean().backward()
                optimizer.step()
            if where == "total" and rank == guilty:
                hang()
            run.total(1)
    except WorkerLost as lost:
        run.failed = True
        return f"{said.getvalue()}{lost}"
    return said.getvalue()


@pytest.mark.parametrize(
    ("where", "guilty", "place"),
    [
        ("replicate", 1, "at run.replicate"),
        ("lane", 2, "in step 1"),
        ("lane", 0, "in step 1"),
        ("total", 1, "at run.total"),
    ],
)
def test_whoever_hangs_is_named_and_the_others_end(where: str, guilty: int, place: str) -> None:
    found = outcomes(3, hangs, where, guilty, limit_s=20)
    others = [found[rank].value for rank in range(3) if rank != guilty]
    assert all(f"worker {guilty} was lost during" in str(said) for said in others), found
    told_by = [said for said in others if f"! waiting for worker {guilty} {place} for " in said]
    assert len(told_by) == 1, others  # on a slow machine another one may be late too, at another time


def test_a_wait_is_told_when_it_is_long_and_again_when_it_is_twice_as_long() -> None:
    said: list[str] = []
    status = WaitWatch(World(0, 3), said.append, look_s=1000)
    try:
        status.enter(Phase.REDUCING, 5)
        began_s = status._wait.since_s
        for second in range(60):
            status._look(began_s + second)
        assert [text.split(" for ")[-1] for text in said] == ["10 s", "20 s", "40 s"]
        assert said[0] == "! waiting for other workers in step 5 for 10 s"
    finally:
        status.close()


def test_a_wait_that_is_usual_is_not_told() -> None:
    said: list[str] = []
    status = WaitWatch(World(0, 2), said.append, look_s=1000)
    try:
        with status.awaiting(Collective.TOTAL):
            status._wait = LookedAtWait(
                Phase.AWAITING, 3, Collective.TOTAL, time.monotonic() - 30
            )  # it has lasted 30 s
        with status.awaiting(Collective.TOTAL):
            status._look(time.monotonic() + 50)
            assert said == []
            status._look(time.monotonic() + 61)
            assert said == ["! waiting for other workers at run.total for 61 s"]
    finally:
        status.close()


def test_work_is_no_wait() -> None:
    said: list[str] = []
    status = WaitWatch(World(0, 2), said.append, look_s=1000)
    try:
        for phase in (Phase.OUTSIDE, Phase.COMPUTING, Phase.ENDED):
            status.enter(phase, 1)
            status._look(time.monotonic() + 100 * LONG_S)
        assert said == []
    finally:
        status.close()


@pytest.mark.parametrize(
    ("awaited", "size", "who"),
    [
        ([1], 3, "worker 1"),
        ([1], 2, "worker 1"),
        ([0, 2], 4, "worker 0, 2"),
        ([1, 2], 3, "other workers"),
        ([], 3, "other workers"),
    ],
)
def test_who_is_waited_for_is_named_where_it_is_known(awaited: list[int], size: int, who: str) -> None:
    wait = LookedAtWait(Phase.AWAITING, 3, Collective.END, 0.0)
    text = report_of(wait, 12.3, awaited, size, 600)
    assert text.startswith(f"! waiting for {who} at the end of the run for 12 s")
    assert text.endswith("after 600 s without a word this worker ends")


def test_one_worker_reports() -> None:
    assert [_reports(World(rank, 3), [1]) for rank in (0, 2)] == [True, False]
    assert [_reports(World(rank, 3), [0]) for rank in (1, 2)] == [True, False]
    assert [_reports(World(rank, 3), []) for rank in (0, 1, 2)] == [True, True, False]
