"""Lanes that were given out by hand stay as they are when workers come and go."""

import os
import signal

import torch
from torch.utils.data import DataLoader, TensorDataset
from workers import outcomes

import lockstep
from lockstep.lanes import Assignment

BY_HAND = ((0, 1, 2), (3,), (4, 5))


def carried(kill: int | None) -> list[list[int]]:
    """The lanes that this worker has carried in the first step, and in the last."""
    run = lockstep.start(lanes=6, assignment=BY_HAND)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.replicate(model, optimizer)
    seen: list[list[int]] = []
    for batch in run.shard(DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=12)):
        if run.step == 1 and run.rank == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        for (x,) in run.lanes(batch):
            model(x).pow(2).mean().backward()
        seen.append(list(run.guard.generation.lanes))
        optimizer.step()
    return [seen[0], seen[-1]]


def test_the_lanes_of_a_lost_worker_go_to_those_who_have_the_fewest() -> None:
    found = outcomes(3, carried, 2)
    assert found[2].killed_by == signal.SIGKILL
    assert found[0].value == [[0, 1, 2], [0, 1, 2]]
    assert found[1].value == [[3], [3, 4, 5]]


def test_a_worker_that_comes_back_has_its_lanes_again() -> None:
    assert Assignment.dealt(6, [0, 1], by_hand=BY_HAND).lanes_of == ((0, 1, 2), (3, 4, 5))
    assert Assignment.dealt(6, [0, 1, 2], by_hand=BY_HAND).lanes_of == BY_HAND
    assert Assignment.dealt(6, [0, 3], by_hand=BY_HAND).lanes_of == ((0, 1, 2), (3, 4, 5))


def test_without_a_hand_lanes_are_dealt_evenly_to_those_who_carry() -> None:
    assert Assignment.dealt(6, [0, 2, 5]).lanes_of == Assignment.even(6, 3).lanes_of
