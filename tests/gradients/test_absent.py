"""A parameter that some lanes do not reach."""

import pytest
import torch
from torch import nn
from workers import on_workers

import lockstep


class Gated(nn.Module):
    """Reaches its one weight in lanes whose data is positive; the gradient there is -0."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.always * x).sum()
        return loss + (self.sometimes * -0.0).sum() if x[0, 0] > 0 else loss


def signs(order: list[float], num_lanes: int) -> list[list[bool]]:
    run = lockstep.start(lanes=num_lanes)
    model = Gated()
    run.replicate(model)
    for x in run.lanes(torch.tensor(order).view(-1, 1).expand(-1, 2)):
        model(x).backward()
    return [p.grad.signbit().tolist() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("order", [[1.0, -1.0], [-1.0, 1.0], [1.0, -1.0, -1.0, 1.0]])
def test_the_sign_of_zero_does_not_depend_on_the_number_of_workers(order: list[float]) -> None:
    alone = on_workers(1, signs, order, len(order))
    assert on_workers(2, signs, order, len(order)) == alone * 2
