"""Scripts of all kinds survive a kill and are joined: loader processes, streams, plain tensors, kept gradients."""

import pytest
from disturbed import Arrival, Plan, disturbed, observed
from faults import Fault
from trainings import Training

TRAININGS = {
    "plain tensors": Training(script="plain"),
    "a stream": Training(script="stream"),
    "a loader with processes": Training(num_workers=2, epochs=1),
    "gradients kept over two run.lanes": Training(script="keeping gradients"),
    "autocast": Training(autocast=True),
    "SGD with momentum": Training(optimizer="sgd"),
}


@pytest.mark.parametrize("point", [pytest.param("after computes", marks=pytest.mark.soak), "after prepares"])
@pytest.mark.parametrize("name", TRAININGS)
def test_a_kill_costs_nothing_in_any_script(name: str, point: str) -> None:
    disturbed(TRAININGS[name], 3, Plan((Fault(1, 1, point),)))


@pytest.mark.parametrize("name", TRAININGS)
def test_any_script_is_joined(name: str) -> None:
    result = disturbed(TRAININGS[name], 2, Plan(arrivals=(Arrival(1, 2),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}


def test_a_run_that_shall_not_recover_raises_who_was_lost() -> None:
    training = Training(options=(("recover", False),))
    result = observed(training, 3, Plan((Fault(1, 2, "before waits"),)))
    assert [result.outcomes[rank].error for rank in (0, 2)] == ["WorkerLost", "WorkerLost"]
    assert any("worker 1 was lost" in result.outcomes[rank].message for rank in (0, 2))  # the other left
