"""What a run replicates, asked for its rates."""

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.state.models import Models


def of_rate(rate: Any) -> Models:
    """Of two groups; the second has another rate than 0.5."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], 0.5)
    optimizer.param_groups[1]["lr"] = rate
    models = Models()
    models.add(model, [optimizer], {})
    return models


def test_a_rate_may_be_a_number_or_a_tensor() -> None:
    for rate in (0.25, torch.tensor(0.25)):
        assert of_rate(rate).rates() == {"optimizer, group 0": 0.5, "optimizer, group 1": 0.25}


@pytest.mark.parametrize("rate", [None, "x", 10**400, torch.zeros(2), {}], ids=str)
def test_a_group_whose_rate_is_no_number_has_none(rate: Any) -> None:
    assert of_rate(rate).rates() == {"optimizer, group 0": 0.5}


def test_a_group_may_have_no_rate() -> None:
    models = of_rate(None)
    del models.optimizers["optimizer"].param_groups[1]["lr"]
    assert models.rates() == {"optimizer, group 0": 0.5}
