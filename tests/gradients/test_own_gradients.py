"""Gradients that the script itself puts into `p.grad` inside a lane: only read, and the same bits on any workers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from workers import on_workers

import lockstep

LANES = 6
X = torch.randn(13, 4, generator=torch.Generator().manual_seed(5))


class Twins(nn.Module):
    """Two weights that are used alike, so that one gradient belongs to both; and a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.other = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.one + self.other).T + self.shift).square().mean()


def one_tensor(model: Twins, x: Tensor) -> list[Tensor]:
    """The same tensor for both weights."""
    weight, shift = torch.autograd.grad(model(x), [model.one, model.shift])
    return [weight, weight, shift]


def views(model: Twins, x: Tensor) -> list[Tensor]:
    """Views of one tensor."""
    weight, shift = torch.autograd.grad(model(x), [model.one, model.shift])
    return [weight.view(3, 4), weight[:], shift.view(3)]


def expanded(model: Twins, x: Tensor) -> list[Tensor]:
    """Elements that share memory."""
    row = x.mean(0)
    return [row.expand(3, 4), row.expand(3, 4), row[:1].expand(3)]


def by_function(model: Twins, x: Tensor) -> list[Tensor]:
    """From torch.func."""

    def loss(one: Tensor, shift: Tensor) -> Tensor:
        return torch.func.functional_call(model, {"one": one, "other": model.other, "shift": shift}, (x,))

    weight, shift = torch.func.grad(loss, argnums=(0, 1))(model.one.detach(), model.shift.detach())
    return [weight, weight, shift]


WAYS = [one_tensor, views, expanded, by_function]


def trained(way: Callable[..., list[Tensor]], lanes: int = LANES, added_up: int = 1) -> list[object]:
    """Four steps, the gradients of some `added_up` and then clipped: [digest, whether own tensors stayed]."""
    with lockstep.start(lanes=lanes, seed=0) as run:
        model = Twins()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.replicate(model, optimizer)
        held: list[tuple[Tensor, Tensor]] = []
        for step in range(4):
            for x in run.lanes(X):
                gradients = way(model, x)
                held += [(gradient, gradient.clone()) for gradient in gradients]
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.grad = gradient
            if step % added_up == added_up - 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        return [run.digest(), all(torch.equal(own, copy) for own, copy in held)]


@pytest.mark.parametrize(("lanes", "added_up"), [(1, 1), (1, 2), (LANES, 2)])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradients_that_share_memory_have_the_same_bits_and_stay_as_they_are(
    way: Callable[..., list[Tensor]], lanes: int, added_up: int
) -> None:
    alone = trained(way, lanes, added_up)
    assert alone[1] is True
    for num_workers in (2, 3, 4):
        assert on_workers(num_workers, trained, way, lanes, added_up) == [alone] * num_workers


def check_against_the_whole_batch(way: Callable[..., list[Tensor]], device: str) -> None:
    with lockstep.start(lanes=LANES, device=device) as run:
        model = Twins().to(device)
        expected = [gradient.clone() for gradient in way(model, X.to(device))]
        run.replicate(model)
        for x in run.lanes(X):
            for parameter, gradient in zip(model.parameters(), way(model, x), strict=True):
                parameter.grad = gradient
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_they_add_up_to_the_gradient_of_the_whole_batch(way: Callable[..., list[Tensor]]) -> None:
    check_against_the_whole_batch(way, "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_they_do_on_a_gpu(way: Callable[..., list[Tensor]]) -> None:
    check_against_the_whole_batch(way, "cuda")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
@pytest.mark.parametrize("side", [40, 900], ids=["small", "in pieces"])
def test_the_weight_is_rounded_as_by_a_multiplication(dtype: torch.dtype, side: int) -> None:
    """Three lanes with weights that no dtype holds: multiplied, rounded, then added."""
    g = torch.Generator().manual_seed(3)
    own = [torch.randn(side, side, generator=g).to(dtype) for _ in range(3)]
    with lockstep.start(lanes=3, assignment=[[0, 1, 2]]) as run:
        model = nn.Linear(side, side, bias=False, dtype=dtype)
        run.replicate(model)
        for number, _ in enumerate(run.lanes(torch.zeros(7, 1))):
            model.weight.grad = own[number]
        first, second, third = (gradient * weight for gradient, weight in zip(own, (2 / 7, 2 / 7, 3 / 7), strict=True))
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad, (first + second) + third)
