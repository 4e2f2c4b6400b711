"""Workers that are lost and that come, where gradients are added in another dtype."""

from typing import Any

import pytest
import torch
import training
from disturbed import Arrival, Plan, disturbed
from faults import Fault
from trainings import Training

OPTIONS: dict[str, tuple[tuple[str, Any], ...]] = {
    "less exact": (("reduce_dtype", "bfloat16"),),
    "more exact": (("reduce_dtype", "float64"),),
}


@pytest.fixture(params=OPTIONS)
def other(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Training:
    monkeypatch.setitem(training.OPTIMIZERS, "fused", lambda p: torch.optim.AdamW(p, 1e-2, fused=True))
    return Training(optimizer="fused", options=OPTIONS[request.param])


def test_a_kill_that_leaves_one_worker_costs_nothing(other: Training) -> None:
    disturbed(other, 2, Plan((Fault(1, 4, "after prepares"),)))


def test_a_worker_that_comes_goes_on_with_the_same_bits(other: Training) -> None:
    result = disturbed(other, 2, Plan(arrivals=(Arrival(3, 2),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}


class Master(torch.optim.Optimizer):
    """Updates copies of the parameters that are more exact than they are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            master = state.setdefault("master", parameter.double())
            master.sub_(parameter.grad.double(), alpha=0.05 / 3)
            parameter.copy_(master)


def test_a_worker_that_comes_is_given_state_of_another_dtype_than_its_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(training.OPTIMIZERS, "master", Master)
    result = disturbed(Training(optimizer="master"), 2, Plan(arrivals=(Arrival(3, 2),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}
