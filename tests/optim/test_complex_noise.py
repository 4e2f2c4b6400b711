"""The square of a complex gradient as Adam sees it: that of its real and imaginary parts."""

import warnings

import pytest
import torch
from torch.optim import Adam, AdamW, Optimizer

from lockstep.optim.noise.preconditioner import Preconditioners


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_it_is_that_of_two_real_numbers(kind: type[Optimizer], amsgrad: bool) -> None:
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
    parts = torch.nn.Parameter(torch.view_as_real(whole.detach()).clone())
    optimizers = [kind([one], 0.01, amsgrad=amsgrad) for one in (whole, parts)]  # type: ignore[call-arg]
    for _ in range(3):
        gradient = torch.randn_like(whole)
        whole.grad, parts.grad = gradient, torch.view_as_real(gradient).clone()
        for optimizer in optimizers:
            optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Preconditioners(optimizers[:1]).square(whole, gradient)
    assert found is not None
    assert not found.is_complex()
    assert float(found) == float(Preconditioners(optimizers[1:]).square(parts, parts.grad))  # type: ignore[arg-type]
