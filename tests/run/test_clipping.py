"""What `run.clip_grad_norm_` and `run.clip_grad_value_` refuse. Their bits are in tests/strategies/test_sharded.py."""

from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import BadArgument


@pytest.mark.parametrize("limit", [0, -1.0, "1", None, True, float("nan")])
def test_a_limit_that_is_no_positive_number_is_refused(limit: Any) -> None:
    with lockstep.start() as run:
        model = nn.Linear(2, 2)
        run.replicate(model, torch.optim.SGD(model.parameters(), 0.1))
        for clip in (run.clip_grad_norm_, run.clip_grad_value_):
            with pytest.raises(BadArgument, match="takes a number above 0"):
                clip(limit)


def test_arguments_in_the_order_of_torch_are_refused_with_the_order_that_is_right() -> None:
    with lockstep.start() as run:
        model = nn.Linear(2, 2)
        run.replicate(model, torch.optim.SGD(model.parameters(), 0.1))
        clip: Any = run.clip_grad_norm_
        with pytest.raises(BadArgument, match=r"write run.clip_grad_norm_\(0.5, parameters\), the number first"):
            clip(model.parameters(), 0.5)
