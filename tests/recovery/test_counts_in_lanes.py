"""What a script counts in the lanes of a training: after a loss a list by lane is right, and a sum is named."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from training import Job, loader_of, make
from workers import on_workers, outcomes

import lockstep


def _trained(victim: int | None, loops: int) -> list[Any]:
    """[digest, totals of each step, the sum of this worker, notes on it]; each batch in so many loops over lanes."""
    said: list[str] = []
    run = lockstep.start(lanes=8, seed=3)
    run._events.subscribe(lambda event: said.append(event.text), lockstep.events.Note)
    model, optimizer = make(Job())
    run.replicate(model, optimizer)
    totals, seen = [], 0
    for batch in run.shard(loader_of(Job())):
        right: list[int] = []
        for x, y in run.lanes(batch):
            output = model(x)
            F.cross_entropy(output, y).backward()
            seen += len(x)
            right.append(int((output.argmax(1) == y).sum()))
            if run.step == 2 and run.rank == victim and len(right) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(loops - 1):
            with torch.no_grad():
                for x, y in run.lanes(batch, train=False):
                    right.append(int((model(x).argmax(1) == y).sum()))
        totals.append(run.total(right))
        optimizer.step()
        optimizer.zero_grad()
    return [run.digest(), totals, seen, [text for text in said if "may be in it twice" in text]]


@pytest.mark.parametrize("loops", [1, 2])
def test_a_list_by_lane_is_totalled_as_without_a_loss_and_a_sum_is_named(loops: int) -> None:
    digest, totals, seen, nothing = on_workers(1, _trained, None, loops)[0]
    assert nothing == []
    killed, *survivors = sorted(outcomes(3, _trained, 1, loops), key=lambda outcome: outcome.killed_by is None)
    assert killed.killed_by == signal.SIGKILL
    assert [outcome.value[:2] for outcome in survivors] == [[digest, totals]] * 2
    assert sum(outcome.value[2] for outcome in survivors) != seen
    for outcome in survivors:
        (note,) = outcome.value[3]
        assert "`seen += len(x)` (line" in note
        assert "Those of step 2 may be in it twice" in note
        assert "A list with one entry for each lane" in note


def test_more_values_than_lanes_are_refused() -> None:
    with lockstep.start(lanes=4) as run:
        model = torch.nn.Linear(3, 2)
        run.replicate(model)
        for x in run.lanes(torch.ones(8, 3)):
            model(x).sum().backward()
        with pytest.raises(lockstep.errors.BadArgument, match="given 5 values, but this worker has computed 4 lanes"):
            run.total([1] * 5)
