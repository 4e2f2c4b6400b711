"""When replicas are compared."""

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.gradients.health import HealthPlan, StepHealth
from lockstep.gradients.plan import StepPlan
from lockstep.lanes import Assignment


def told(num_workers: int, step: int) -> bytes:
    def state() -> Mapping[str, Any]:
        return {"weight": torch.ones(3)}

    plan = StepPlan(step, 8, Assignment.even(2, num_workers))
    return StepHealth(HealthPlan(state, "keep", drift_every=10), plan, ["weight"]).packed()


def test_replicas_are_compared_in_every_so_many_steps_but_not_the_first() -> None:
    assert [len(told(2, step)) > 0 for step in (0, 5, 10, 11, 20)] == [False, False, True, False, True]


def test_a_worker_that_is_alone_takes_no_fingerprint() -> None:
    assert told(1, 10) == b""
