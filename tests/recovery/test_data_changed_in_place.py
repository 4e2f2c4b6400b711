"""A script may write to a lane's data in place: its own batch, and a step computed again, see the data as they were."""

import os
import signal
from typing import Any

import pytest
import torch.nn.functional as F
from training import Job, data, loader_of, make
from workers import on_workers, outcomes

import lockstep


def _trained(source: str, victim: int | None) -> list[Any]:
    run = lockstep.start(lanes=8, seed=3)
    model, optimizer = make(Job())
    run.replicate(model, optimizer)
    x, y = data()
    whole = x[:52].clone(), y[:52]
    batches = run.shard(loader_of(Job())) if source == "loader" else [whole] * 3
    for batch in batches:
        for inputs, targets in run.lanes(batch):
            inputs.mul_(2)
            F.cross_entropy(model(inputs), targets).backward()
        if run.step == 2 and run.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
    return [run.digest(), run.step, whole[0].equal(x[:52])]


@pytest.mark.parametrize("source", ["loader", "plain tensors"])
def test_data_that_a_lane_has_changed_in_place_are_fresh_when_the_step_is_computed_again(source: str) -> None:
    undisturbed = on_workers(1, _trained, source, None)[0]
    assert undisturbed[2]
    killed, *survivors = sorted(outcomes(3, _trained, source, 1), key=lambda outcome: outcome.killed_by is None)
    assert killed.killed_by == signal.SIGKILL
    assert [outcome.value for outcome in survivors] == [undisturbed] * 2
