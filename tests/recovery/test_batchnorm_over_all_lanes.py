"""Batch norm over the whole batch, whose lanes exchange statistics in the middle of a pass, survives a loss there."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from disturbed import Arrival, Plan, Told, observed
from faults import Fault, Script, sampled
from launched import died, dying, launched_script, result_of
from trainings import Training, Work
from workers import on_workers, outcomes

from lockstep.launch.channels.status import StatusPage
from lockstep.settings.environments.lockstep_run import SLOT, STATUS_FD

NUM_LANES = 3
TRAINING = Training(model="conv", script="drawing", lanes=NUM_LANES, whole_norms=True, epochs=1)

SCRIPT = """
import torch
import torch.nn.functional as F
from training import Job, loader_of, make

run = lockstep.start(lanes=3, seed=3)
job = Job(model="conv")
model, optimizer = make(job)
model = lockstep.sync_batchnorm(model)
model.norm2.register_forward_pre_hook(lambda *_: reach("forward", run.step, run.rank))
model.norm2.register_full_backward_hook(lambda *_: reach("backward", run.step, run.rank))
run.replicate(model, optimizer)
loader = run.shard(loader_of(job))
for epoch in run.epochs(3):
    for batch in loader:
        scale = 1.0 + float(torch.rand(()))
        for x, y in run.lanes(batch):
            (F.cross_entropy(model(x), y) * scale).backward()
        reach("update", run.step, run.rank)
        optimizer.step()
        optimizer.zero_grad()
run.print("digest", run.digest(), run.step, flush=True)
"""


@cache
def _undisturbed() -> Told:
    """On as many workers as lanes: fewer cannot do it."""
    return observed(TRAINING, NUM_LANES, Plan())


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers have a launcher's page, so they know that replacements may come."""
    with StatusPage() as page:
        monkeypatch.setenv(STATUS_FD, str(page.fd))
        yield


def _train(faults: list[Fault]) -> str:
    """In a worker: its digest at the end, and its noise."""
    number = os.environ[SLOT] = os.environ["RANK"]
    script = Script(faults, int(number))
    work = Work(TRAINING, TRAINING.start(), script.reach, lambda run: None)
    script.watch(work.run)
    work.train()
    return f"{work.run.digest()} {work.run.noise}"


@pytest.mark.parametrize("worker", [1, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("point", [pytest.param("in forward", marks=pytest.mark.soak), "in backward"])
def test_a_worker_lost_between_two_exchanges_costs_nothing_while_there_is_one_for_each_lane(
    point: str, worker: int
) -> None:
    """Of four workers the first carries no lane; when another is lost it carries one."""
    result = outcomes(NUM_LANES + 1, _train, [Fault(worker, 1, point)])
    assert result[worker].killed_by
    assert [outcome.value for outcome in result if not outcome.killed_by] == _undisturbed().values("digest")


def test_too_few_workers_for_the_lanes_and_nobody_to_replace_the_lost_one_is_said() -> None:
    result = observed(TRAINING, NUM_LANES, Plan((Fault(1, 1, "in forward"),)))
    assert {result.outcomes[worker].error for worker in (0, 2)} == {"Misuse"}
    assert "Start with lanes=2" in result.outcomes[0].message


@pytest.mark.parametrize("worker", [0, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("point", sampled(["in forward", "in backward", "before update"], 3))
def test_those_who_are_left_wait_for_one_at_the_door_and_go_on_with_the_same_bits(
    supervised: None, point: str, worker: int
) -> None:
    """The script draws before and after each step: one that comes in the middle of a step draws the same."""
    result = observed(TRAINING, NUM_LANES, Plan((Fault(worker, 1, point),), (Arrival(1, 3),)))
    assert result.outcomes[worker].killed_by
    assert result.values("digest") == _undisturbed().values("digest")
    assert result.values("notes") == _undisturbed().values("notes")
    assert result.used == _undisturbed().used


def test_one_that_is_left_alone_waits_for_two(supervised: None) -> None:
    plan = Plan((Fault(0, 1, "in forward"), Fault(2, 1, "in backward")), (Arrival(1, 3), Arrival(1, 4)))
    result = observed(TRAINING, NUM_LANES, plan)
    assert [outcome.killed_by is not None for outcome in result.outcomes] == [True, False, True, False, False]
    assert result.values("digest") == _undisturbed().values("digest")


@pytest.mark.soak
@pytest.mark.parametrize(
    "deaths",
    [
        [("forward", 2, 1), ("backward", 5, 0), ("update", 7, 2)],
        [("backward", 1, 2), ("forward", 1, 0), ("forward", 8, 1)],
    ],
)
def test_the_launcher_replaces_those_who_are_lost_in_the_middle_of_a_pass(
    tmp_path: Path, deaths: list[tuple[object, ...]]
) -> None:
    undisturbed = on_workers(NUM_LANES, result_of, dying(SCRIPT, tmp_path, ()))[0]
    with launched_script(tmp_path, dying(SCRIPT, tmp_path, deaths), "-n", "3", "--spares", "1") as run:
        assert list(run.finish()) == undisturbed
    assert died(tmp_path) == len(deaths)
