"""A failure that comes again although nobody is lost is no loss: the run does not compute a step for ever."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from workers import on_workers

import lockstep
from lockstep.elastic.guard import MOST_IN_VAIN
from lockstep.errors import WorkerLost


def _train(most_failures: int) -> tuple[list[int], str]:
    """How often each of three steps was reduced where so many attempts at each fail, though all workers live."""
    attempts, error = [0, 0, 0], ""
    run = lockstep.start(lanes=2, seed=1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.replicate(model, optimizer)
    engine: Any = run.guard._engine
    reduce = engine.reduce

    def failing(requests: Sequence[bool], carries: bool) -> Any:
        attempts[run.step] += 1
        if attempts[run.step] <= most_failures:
            raise WorkerLost(1 - run.rank, run.step, "a wait", "nothing is wrong with it")
        return reduce(requests, carries)

    engine.reduce = failing
    try:
        for _ in range(3):
            for x in run.lanes(torch.ones(4, 2)):
                model(x).sum().backward()
            optimizer.step()
    except WorkerLost as lost:
        error = str(lost)
    return attempts, error


@pytest.mark.parametrize(
    ("most_failures", "attempts"), [(MOST_IN_VAIN - 1, [MOST_IN_VAIN] * 3), (9, [MOST_IN_VAIN, 0, 0])]
)
def test_a_step_is_computed_again_a_few_times_in_a_row(most_failures: int, attempts: list[int]) -> None:
    for found, error in on_workers(2, _train, most_failures):
        assert found == attempts
        assert ("nothing is wrong with it" in error) == (most_failures == 9)
