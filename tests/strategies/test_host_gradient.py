"""A gradient without memory does what a plain tensor does: same values, same bits, whatever a script does with it."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _foreach_utils

from lockstep.capture.update import CapturedUpdate
from lockstep.errors import Misuse
from lockstep.strategies.sharded import host_gradient
from lockstep.strategies.sharded.host_gradient import HostGradient
from lockstep.strategies.sharded.once import Form, flat

Deed = Callable[[list[nn.Parameter]], Any]


def _parameters(*, plain: bool) -> list[nn.Parameter]:
    """Each with a gradient; one stands in memory in another order."""
    chance = torch.Generator().manual_seed(4)
    made = []
    for shape in [(7, 5), (3,), (2, 3, 4, 4)]:
        values = torch.randn(shape, generator=chance)
        if len(shape) == 4:
            values = values.to(memory_format=torch.channels_last)
        parameter = nn.Parameter(torch.zeros_like(values))
        parameter.grad = values if plain else _hosted(values)
        made.append(parameter)
    return made


def _hosted(values: torch.Tensor) -> HostGradient:
    return HostGradient(Form.of(values), lambda start, stop: flat(values)[start:stop].clone())


def _zero_grad(parameters: list[nn.Parameter]) -> None:
    torch.optim.SGD(parameters, 0.1).zero_grad(set_to_none=False)


def _unscaled(parameters: list[nn.Parameter]) -> float:
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(parameters, 0.1))
    return scaler._found_inf_per_device(torch.optim.SGD(parameters, 0.1)) is not None


def _with_a_number_that_changes(parameters: list[nn.Parameter]) -> None:
    factor = torch.tensor(0.3)
    torch._foreach_mul_([one.grad for one in parameters], factor)
    parameters[0].grad.mul_(factor)
    factor.fill_(100.0)


def _through_data(parameters: list[nn.Parameter]) -> None:
    for one in parameters:
        one.grad.data.clamp_(-0.1, 0.1)
        one.grad.detach().mul_(2.0)


def _other_data(parameters: list[nn.Parameter]) -> None:
    parameters[0].grad.data = torch.full_like(parameters[0], 4.0)


def _into_another(parameters: list[nn.Parameter]) -> list[float]:
    """What is written is another tensor."""
    total = torch.zeros(7, 5)
    total.add_(parameters[0].grad).addcmul_(parameters[0].grad, parameters[0].grad)
    torch.add(parameters[0].grad, 1.0, out=total)
    return total.tolist()


def _saved(parameters: list[nn.Parameter]) -> list[float]:
    file = io.BytesIO()
    torch.save(parameters[0].grad, file)
    file.seek(0)
    return torch.load(file).tolist()


WITHOUT_MEMORY: dict[str, Deed] = {
    "norm": lambda parameters: [one.grad.norm().item() for one in parameters],
    "norms together": lambda parameters: torch.stack(torch._foreach_norm([one.grad for one in parameters])).tolist(),
    "torch's total norm": lambda parameters: torch.nn.utils.get_total_norm([one.grad for one in parameters]).item(),
    "clipped by norm": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5).item(),
    "clipped by value": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.2),
    "clipped one by one": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.2, foreach=False),
    "scaled, then read": lambda parameters: [one.grad.mul_(0.3).div_(7.0).sum().item() for one in parameters],
    "a number that changes later": _with_a_number_that_changes,
    "GradScaler": _unscaled,
    "into another tensor": _into_another,
    "torch.save": _saved,
    "a copy": lambda parameters: [copy.deepcopy(one.grad).tolist() for one in parameters],
    "printed": lambda parameters: [repr(one.grad) for one in parameters],
    "isfinite": lambda parameters: [bool(torch.isfinite(one.grad).all()) for one in parameters],
    "moved": lambda parameters: [one.grad.to(torch.float64).tolist() for one in parameters],
}  # fmt: skip
WITH_MEMORY: dict[str, Deed] = {
    "zero_grad": _zero_grad,
    "through data": _through_data,
    "other data": _other_data,
    "a view": lambda parameters: parameters[0].grad.view(-1)[3:9].fill_(2.0).tolist(),
    "an element": lambda parameters: parameters[0].grad.__setitem__((2, 1), 9.0),
    "elements of its own": lambda parameters: parameters[0].grad.mul_(torch.arange(5.0)).tolist(),
    "+=": lambda parameters: parameters[0].grad.__iadd__(1.0).tolist(),
    "written, then scaled": lambda parameters: [one.grad.add_(1.0).mul_(0.1).tolist() for one in parameters],
    "numpy": lambda parameters: parameters[0].grad.numpy().sum().item(),
    "noise": lambda parameters: [one.grad.add_(torch.full_like(one.grad, 0.5)).tolist() for one in parameters],
}  # fmt: skip


def _after(deed: Deed, *, plain: bool) -> tuple[Any, list[Any], list[nn.Parameter]]:
    parameters = _parameters(plain=plain)
    result = deed(parameters)
    return result, [one.grad.tolist() for one in parameters], parameters


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_it_is_read_scaled_and_clipped_without_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_gradient, "GROUP_BYTES", 150)
    *found, parameters = _after(WITHOUT_MEMORY[name], plain=False)
    assert found == list(_after(WITHOUT_MEMORY[name], plain=True)[:2])
    assert [one.grad._own for one in parameters] == [None] * 3


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_any_other_write_gives_it_memory_of_its_own(name: str) -> None:
    *found, parameters = _after(WITH_MEMORY[name], plain=False)
    assert found == list(_after(WITH_MEMORY[name], plain=True)[:2])
    assert any(one.grad._own is not None for one in parameters)


def test_a_part_is_that_of_the_whole_whatever_was_put_off() -> None:
    for deed in (lambda grad: None, lambda grad: grad.mul_(0.3).clamp_(-0.2, 0.2), lambda grad: grad.add_(1.0)):
        gradient = _parameters(plain=False)[2].grad
        deed(gradient)
        assert torch.equal(gradient.part(5, 33), flat(gradient.clone())[5:33])


def test_memory_of_another_order_is_read_in_the_order_of_its_elements() -> None:
    gradient = _parameters(plain=False)[2].grad
    other = torch.randn(gradient.shape)
    assert other.stride() != gradient.stride()
    gradient.data = other
    assert torch.equal(gradient.clone(), other)
    assert torch.equal(gradient.part(5, 33), flat(other.to(memory_format=torch.channels_last))[5:33])


def test_other_values_forget_what_was_done_to_those_before() -> None:
    values = torch.ones(3)
    gradient = _hosted(values)
    gradient.mul_(2.0)
    values.fill_(5.0)
    gradient.renew()
    assert gradient.tolist() == [5.0] * 3
    gradient.add_(1.0)
    gradient.renew()
    assert gradient.tolist() == [5.0] * 3


def test_torch_takes_the_same_path_for_many_of_them_on_a_gpu_as_for_plain_tensors() -> None:
    """By type alone: another path would have other bits."""
    for gradients in ([one.grad for one in _parameters(plain=plain)] for plain in (True, False)):
        assert _foreach_utils._has_foreach_support(gradients, torch.device("cuda"))


def test_an_update_that_reads_them_is_not_recorded() -> None:
    for plain, reason in ((True, None), (False, "its gradients stand in the memory of the host")):
        optimizer = torch.optim.SGD(_parameters(plain=plain), 0.1)
        assert CapturedUpdate(optimizer, torch.device("cpu"), print, set)._obstacle((), {}) == reason


def test_other_data_of_another_shape_is_refused() -> None:
    with pytest.raises(Misuse, match=r"p\.grad\.data = "):
        _hosted(torch.ones(3)).data = torch.ones(4)
