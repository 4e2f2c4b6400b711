"""The naive trainer, and the measure of distance."""

import pytest
import torch
import torch.nn.functional as F

from lockstep.verify.reference import relative_difference, train


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(batch), batch)


def test_it_does_what_gradient_descent_does_by_hand() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 3.0)
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.25), [torch.tensor([[1.0]])] * 2, loss)
    # loss = (w - 1)², w <- w - 0.25·2·(w - 1): 3, 2, 1.5
    assert losses == [4.0, 1.0]
    assert model.weight.item() == 1.5


def test_it_stops_after_the_given_steps_of_an_endless_stream() -> None:
    model = torch.nn.Linear(1, 1)
    endless = iter(lambda: torch.ones(2, 1), None)
    assert len(train(model, torch.optim.SGD(model.parameters(), lr=0.1), endless, loss, steps=3)) == 3


def test_it_steps_the_scheduler_once_per_batch() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    halving = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    train(model, optimizer, [torch.zeros(1, 1)] * 3, loss, scheduler=halving)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_the_relative_difference_is_to_the_largest_value_of_the_second() -> None:
    a, b = {"w": torch.tensor([1.0, -3.0])}, {"w": torch.tensor([1.0, -4.0])}
    assert relative_difference(a, b) == {"w": 0.25}


def test_equal_tensors_have_no_difference_even_where_all_are_zero() -> None:
    zeros = {"w": torch.zeros(3), "none": torch.zeros(0), "count": torch.tensor(0)}
    assert relative_difference(zeros, zeros) == {"w": 0.0, "none": 0.0, "count": 0.0}


def test_a_difference_to_zero_is_infinite() -> None:
    assert relative_difference({"w": torch.ones(1)}, {"w": torch.zeros(1)}) == {"w": float("inf")}


def test_differences_too_small_for_the_dtype_of_the_tensor_are_seen() -> None:
    a, b = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0], dtype=torch.bfloat16)
    a.view(torch.int16).add_(1)
    assert relative_difference({"w": a}, {"w": b}) == {"w": 2.0**-7}


def test_tensors_that_only_one_side_has_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="only one side has \\['b'\\]"):
        relative_difference({"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1)})
