"""Modes of modules and parameters go on after a resume; others in the middle of a pass are refused."""

import pytest
import torch
from torch import nn

from lockstep.script.restart.modes import ModelModes
from lockstep.state.models import Models


def made() -> tuple[nn.Sequential, ModelModes]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    models = Models()
    models.add(model, [], {})
    return model, ModelModes(models)


def test_modes_that_were_set_are_put_back() -> None:
    model, modes = made()
    assert modes.begin("train.py:9", at_start=True) == []
    model[0].requires_grad_(False)
    model[1].eval()
    assert modes.begin("train.py:9", at_start=False) == []
    new, others = made()
    new[2].eval()
    others.load(modes.state())
    assert [module.training for module in new] == [True, False, True]
    assert [one.requires_grad for one in new.parameters()] == [False, False, True, True, True, True]
    assert others.begin("train.py:9", at_start=False) == []
    assert others.state() == modes.state()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.train(), "model.1 is in training mode in the loop at train.py:9, and was not"),
        (lambda model: model[2].eval(), "model.2 is in evaluation mode"),
        (lambda model: model.requires_grad_(), "parameter 0.bias is not frozen .* taken, and 1 more are not as"),
        (lambda model: model[2].bias.requires_grad_(False), "parameter 2.bias is frozen"),
    ],
)
def test_others_in_the_middle_of_a_pass_are_wrong(change: object, words: str) -> None:
    model, modes = made()
    modes.begin("train.py:9", at_start=True)
    model[0].requires_grad_(False)
    model[1].eval()
    modes.begin("train.py:9", at_start=False)
    new, others = made()
    others.load(modes.state())
    change(new)  # type: ignore[operator]
    (found,) = others.begin("train.py:9", at_start=False)
    assert found.is_wrong
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(str(found))
    assert others.begin("train.py:9", at_start=False) == []


def test_at_the_start_of_a_pass_only_the_first_ones_are_named() -> None:
    model, modes = made()
    modes.begin("train.py:9", at_start=True)
    model[1].eval()
    modes.begin("train.py:9", at_start=True)
    for change, is_named in ((lambda new: new.train(), True), (lambda new: new[2].eval(), False)):
        new, others = made()
        others.load(modes.state())
        change(new)
        found = others.begin("train.py:9", at_start=True)
        assert len(found) == is_named
        assert not any(one.is_wrong for one in found)


def test_loops_with_a_rhythm_of_their_own_are_left_alone() -> None:
    model, modes = made()
    for step in range(4):
        model[0].requires_grad_(step % 2 == 0)
        assert modes.begin("train.py:9", at_start=False) == []
        model[0].requires_grad_()
        assert modes.begin("train.py:12", at_start=False) == []
    new, others = made()
    others.load(modes.state())
    assert all(one.requires_grad for one in new.parameters()), "as in the loop that was last"
    assert others.begin("train.py:9", at_start=False) == []
    new[0].requires_grad_(False)
    found = others.begin("train.py:12", at_start=False)
    assert found, "each loop has modes of its own"


def test_a_loop_that_the_snapshot_does_not_know_is_not_compared() -> None:
    _, modes = made()
    modes.begin("train.py:9", at_start=True)
    new, others = made()
    others.load(modes.state())
    new.eval()
    assert others.begin("other.py:1", at_start=False) == []
    others.load([])
    assert others.begin("train.py:9", at_start=False) == []
    assert not new.training


def test_whole_numbers_that_came_later_need_no_gradient() -> None:
    _, modes = made()
    modes.begin("train.py:9", at_start=True)
    new, others = made()
    new.table = nn.Parameter(torch.arange(3), requires_grad=False)
    others.load(modes.state())
    assert not new.table.requires_grad
