"""Hooks that change gradients by more than a factor are noted by the names of their parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_lane_state import notes, train
from torch import Tensor, nn

from lockstep import Run
from lockstep.script.lanes.gradient_hooks import hooks_that_are_not_linear

MASK, norms = torch.ones(2), list[Tensor]()


def by_norm(gradient: Tensor) -> Tensor:
    size = gradient.norm()
    return gradient / size if size > 1 else gradient


def in_place(gradient: Tensor) -> None:
    gradient.clamp_(-1, 1)


def logged(gradient: Tensor) -> None:
    norms.append(gradient.norm())


def logged_and_bounded(gradient: Tensor) -> Tensor:
    norms.append(gradient.norm())
    return gradient.clamp(-1, 1)


def norm(gradient: Tensor) -> Tensor:
    return gradient / 3


class Signed:
    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient.sign()


CHANGING = {
    "a bound": lambda g: g.clamp(-1, 1),
    "a norm": by_norm,
    "in place": in_place,
    "a log beside a bound": logged_and_bounded,
    "a bound and another sign": lambda g: -g.clamp(-1, 1),
    "torch's own": torch.sign,
    "torch's own in Python": F.normalize,
    "with arguments": partial(torch.clamp, min=-1, max=1),
    "a function with arguments": partial(lambda low, g: g.clamp(low), -1),
    "an object": Signed(),
    "noise": lambda g: g + 0.1 * torch.randn_like(g),
}
HARMLESS = {
    "a factor": lambda g: 0.5 * g,
    "a mask": lambda g: g * MASK,
    "a factor of that name": norm,
    "torch's own factor": torch.neg,
    "a library's": eval(compile("lambda g: g.clamp(-1, 1)", torch.__file__, "eval")),
    "a log": logged,
    "a log in a line": lambda g: norms.append(g.norm()),
}


@pytest.mark.parametrize("hook", CHANGING.values(), ids=CHANGING)
def test_a_hook_that_is_more_than_a_factor_is_found(hook: Callable[[Tensor], Any]) -> None:
    model = nn.Linear(3, 2)
    model.bias.register_hook(hook)
    (found,) = hooks_that_are_not_linear([model])
    assert found.endswith(" of bias")


@pytest.mark.parametrize("hook", HARMLESS.values(), ids=HARMLESS)
def test_a_factor_and_a_log_are_not(hook: Callable[[Tensor], Any]) -> None:
    model = nn.Linear(3, 2)
    model.bias.register_hook(hook)
    assert hooks_that_are_not_linear([model]) == []


def test_hooks_of_modules_that_give_back_other_gradients_are_found() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[1].register_full_backward_hook(
        lambda module, given, _: tuple(g if g is None else g.clamp(-1, 1) for g in given)
    )
    model[0].register_full_backward_hook(lambda *_: norms.append(model[0].weight.norm()))
    (found,) = hooks_that_are_not_linear([model])
    assert found.endswith("of test_gradient_hooks.py) of 1")


def test_a_hook_of_the_whole_model_is_named_by_its_class() -> None:
    model = nn.Linear(3, 2)
    model.register_full_backward_pre_hook(lambda module, given: tuple(g.clamp(-1, 1) for g in given))
    (found,) = hooks_that_are_not_linear([model])
    assert found.endswith("of test_gradient_hooks.py) of Linear")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_note_names_the_parameter_and_what_to_write_in_runs_with_several_lanes(num_workers: int) -> None:
    def script(run: Run) -> None:
        model = nn.Linear(3, 2)
        model.bias.register_hook(by_norm)
        train(run, model)

    (note,) = notes(num_workers, script)
    assert "`by_norm` (line" in note
    assert "of bias: where it is more than a factor" in note
    assert "run.clip_grad_value_" in note
    assert notes(1, script, lanes=1) == []


def test_no_hook_of_the_run_or_of_a_compiled_model_is_noted() -> None:
    assert notes(2, lambda run: train(run, torch.compile(nn.Linear(3, 2), backend="aot_eager"))) == []
