"""What `run.clip_grad_norm_` and `run.clip_grad_value_` refuse. Their bits are in tests/strategies/test_sharded.py."""

from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import BadArgument


@pytest.mark.parametrize("limit", [-1.0, "1", None, True, float("nan")])
def test_a_limit_that_is_no_number_from_0_on_is_refused(limit: Any) -> None:
    with lockstep.start() as run:
        model = nn.Linear(2, 2)
        run.replicate(model, torch.optim.SGD(model.parameters(), 0.1))
        for clip in (run.clip_grad_norm_, run.clip_grad_value_):
            with pytest.raises(BadArgument, match="takes a number, 0 or more"):
                clip(limit)


def test_arguments_in_the_order_of_torch_are_refused_with_the_order_that_is_right() -> None:
    with lockstep.start() as run:
        model = nn.Linear(2, 2)
        run.replicate(model, torch.optim.SGD(model.parameters(), 0.1))
        clip: Any = run.clip_grad_norm_
        with pytest.raises(BadArgument, match=r"write run.clip_grad_norm_\(0.5, parameters\), the number first"):
            clip(model.parameters(), 0.5)


def test_a_limit_of_0_leaves_nothing_as_with_torch() -> None:
    with lockstep.start() as run:
        model = nn.Linear(2, 2)
        run.replicate(model)
        for clip in (run.clip_grad_norm_, run.clip_grad_value_):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            norm = clip(0)
            assert norm is None or norm == 6**0.5
            assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
