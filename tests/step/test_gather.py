"""`run.gather`: what every lane has given, on every worker, in an order that does not depend on the workers."""

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from workers import on_workers, outcomes

import lockstep
from lockstep.errors import BadArgument, Misuse

X = torch.randn(23, 5, generator=torch.Generator().manual_seed(1))


def evaluated(num_batches: int) -> list[Any]:
    """[predictions, other entries] over batches of uneven sizes, some with fewer samples than lanes."""
    with lockstep.start(lanes=6, seed=0) as run:
        torch.manual_seed(2)
        model = nn.Linear(5, 3)
        run.replicate(model)
        model.eval()
        scores, others = [], []
        with torch.no_grad():
            for batch in X.split(-(-len(X) // num_batches)):
                for x in run.lanes(batch):
                    scores.append(model(x))
                    others.append({"rows": len(x), "first": (float(x[0, 0]), "text"), "none": None})
            whole = torch.cat(run.gather(scores))
            torch.testing.assert_close(whole, model(X))
        gathered = run.gather(others)
        assert sum(entry["rows"] for entry in gathered) == len(X)
        return [whole.tolist(), gathered]


def evaluated_in_1_2_and_6_batches() -> list[Any]:
    return [evaluated(num_batches) for num_batches in (1, 2, 6)]


def test_all_workers_have_what_one_would_have() -> None:
    alone = on_workers(1, evaluated_in_1_2_and_6_batches)
    for num_workers in (2, 3, 4):
        assert on_workers(num_workers, evaluated_in_1_2_and_6_batches) == alone * num_workers


def test_tensors_of_any_dtype_come_back_as_they_were() -> None:
    with lockstep.start(lanes=2) as run:
        run.replicate(nn.Linear(2, 2))
        given = [torch.tensor([1.5], dtype=torch.bfloat16), [torch.arange(3), torch.tensor(True)]]
        entries = iter(given)
        found = [next(entries) for _ in run.lanes(torch.ones(4, 2), train=False)]
        one, (two, three) = run.gather(found)
        assert (one.dtype, one.item()) == (torch.bfloat16, 1.5)
        assert (two.tolist(), three.dtype) == ([0, 1, 2], torch.bool)
        assert one is not given[0]


def after_a_loss(victim: int | None) -> list[Any]:
    run = lockstep.start(lanes=6, seed=3)
    torch.manual_seed(2)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.replicate(model, optimizer)
    gathered = []
    for _ in range(4):
        sums = []
        for x in run.lanes(X):
            loss = model(x).square().mean()
            loss.backward()
            sums.append(loss.detach())
            if run.step == 2 and run.rank == victim and len(sums) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        gathered.append(torch.stack(run.gather(sums)).tolist())
        optimizer.step()
        optimizer.zero_grad()
    return gathered


def test_lanes_that_are_computed_again_are_there_once() -> None:
    (alone,) = on_workers(1, after_a_loss, None)
    assert [len(lanes) for lanes in alone] == [6] * 4
    killed, *survivors = sorted(outcomes(3, after_a_loss, 1), key=lambda outcome: outcome.killed_by is None)
    assert killed.killed_by == signal.SIGKILL
    assert [outcome.value for outcome in survivors] == [alone] * 2


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (3, "takes a list with one entry for each lane, not int"),
        (torch.ones(2), "takes a list with one entry for each lane, not Tensor"),
        ([1, 2, 3], "run.gather was given 3 values, but this worker has computed 2 lanes"),
        ([1, object()], "entry 1 of run.gather is a object"),
    ],
)
def test_bad_input_is_named(values: Any, told: str) -> None:
    with lockstep.start(lanes=2) as run:
        run.replicate(nn.Linear(2, 2))
        for _ in run.lanes(torch.ones(4, 2), train=False):
            pass
        with pytest.raises(BadArgument, match=told):
            run.gather(values)


def test_it_is_refused_inside_of_lanes() -> None:
    with lockstep.start(lanes=2) as run:
        run.replicate(nn.Linear(2, 2))
        with pytest.raises(Misuse, match=r"run.gather inside of run.lanes"):
            for _ in run.lanes(torch.ones(4, 2), train=False):
                run.gather([])


def going_different_ways() -> str:
    with lockstep.start(lanes=2) as run:
        run.replicate(nn.Linear(2, 2))
        try:
            if run.rank == 0:
                run.gather([])
            else:
                run.total(0)
        except lockstep.errors.Disagreement as failure:
            return str(failure)
        return "nothing"


def test_another_call_on_another_worker_is_named() -> None:
    for said in on_workers(2, going_different_ways):
        assert "run.gather" in said
        assert "run.total" in said


def test_an_array_is_refused_with_what_to_give() -> None:
    with lockstep.start(lanes=1) as run:
        for _ in run.lanes(X):
            pass
        with pytest.raises(BadArgument, match=r"entry 0 of run.gather is a ndarray.*torch\.from_numpy"):
            run.gather([np.zeros(3)])
