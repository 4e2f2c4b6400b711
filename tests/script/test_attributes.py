"""Numbers in the attributes of models and optimizers that training has changed go on; others are left alone."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.script.attributes import ModelAttributes, Renewed
from lockstep.state.models import Models


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(2, 2), nn.Dropout(0.5)
        self.temperature, self.best, self.width, self.phase, self.is_warm = 2.0, None, 4, "first", False

    def cool(self) -> None:
        self.temperature *= 0.9


class Counting(torch.optim.SGD):
    updates = 0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.updates = 0


def made() -> tuple[Tempered, Counting, ModelAttributes]:
    model = Tempered()
    optimizer = Counting(model.parameters())
    models = Models()
    models.add(model, [optimizer], {})
    return model, optimizer, ModelAttributes(models)


def train(model: Any, optimizer: Counting) -> None:
    model.temperature, model.best, model.drop.p, optimizer.updates = 0.7, float("inf"), 0.25, 3
    model.phase, model.is_warm = "second", True


def test_numbers_that_have_changed_are_put_back_and_nothing_else() -> None:
    model, optimizer, attributes = made()
    assert attributes.changed() == {}
    assert attributes.begin(at_start=False) == []
    assert attributes.changed() == {}
    train(model, optimizer)
    model.train(mode=False)
    saved = attributes.changed()
    assert sorted(saved) == ["model.best", "model.drop.p", "model.temperature", "optimizer.updates"]

    new, its_optimizer, others = made()
    others.load(saved)
    assert (new.temperature, new.best, new.drop.p, its_optimizer.updates) == (0.7, float("inf"), 0.25, 3)
    assert (new.phase, new.is_warm, new.training, new.width) == ("first", False, True, 4)
    assert others.begin(at_start=False) == []
    assert others.changed() == saved, "those of before go on"


def test_a_number_that_the_script_sets_anew_is_named_and_one_that_it_computes_is_not() -> None:
    model, optimizer, attributes = made()
    attributes.begin(at_start=False)
    train(model, optimizer)
    saved = attributes.changed()

    new, its_optimizer, others = made()
    others.load(saved)
    new.temperature, its_optimizer.updates = 2.0, 4
    (renewed,) = others.begin(at_start=False)
    assert renewed == Renewed("model.temperature", 2.0, 0.7, goes_on=True)
    assert "model.temperature is 2.0 and was 0.7" in str(renewed)
    assert others.begin(at_start=False) == []


def test_of_one_that_no_code_goes_on_from_it_is_not_known_whether_it_is_computed() -> None:
    model, optimizer, attributes = made()
    attributes.begin(at_start=False)
    train(model, optimizer)
    new, _, others = made()
    others.load(attributes.changed())
    new.drop.p = 0.5
    assert others.begin(at_start=False) == [Renewed("model.drop.p", 0.5, 0.25, goes_on=False)]


PASSES = """
def train(model, run, loader):
    for epoch in run.epochs(3):
        model.temperature = 2.0
        for batch in loader:
            for x in run.lanes(batch):
                model(x).sum().backward()
            model.temperature *= 0.9
"""


def test_what_is_set_before_each_pass_is_as_it_should_be_when_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PASSES)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.delattr(Tempered, "cool")
    monkeypatch.setattr(Tempered, "__module__", "__main__")
    found = {}
    for at_start in (True, False):
        model, optimizer, attributes = made()
        attributes.begin(at_start=True)
        train(model, optimizer)
        new, _, others = made()
        others.load(attributes.changed())
        new.temperature = 2.0
        found[at_start] = others.begin(at_start=at_start)
    assert found == {True: [], False: [Renewed("model.temperature", 2.0, 0.7, goes_on=True)]}


def test_a_snapshot_that_is_loaded_while_training_goes_on() -> None:
    model, optimizer, attributes = made()
    attributes.begin(at_start=False)
    train(model, optimizer)
    saved = attributes.changed()
    model.temperature = 0.1
    attributes.load(saved)
    assert model.temperature == 0.7
    assert attributes.begin(at_start=False) == []
    assert attributes.changed() == saved


@pytest.mark.parametrize("name", ["model.gone", "optimizer2.updates", ""])
def test_a_number_of_something_that_is_not_there_is_left_out(name: str) -> None:
    model, _, attributes = made()
    attributes.load({name: [1, 2]})
    assert attributes.begin(at_start=False) == []
    assert model.temperature == 2.0


def test_a_compiled_model_has_the_names_of_a_plain_one() -> None:
    model, _, attributes = made()
    attributes.begin(at_start=False)
    model.temperature = 1.0
    models = Models()
    models.add(torch.compile(model, backend="eager"), [], {})
    compiled = ModelAttributes(models)
    compiled.begin(at_start=False)
    model.temperature = 0.5
    assert list(compiled.changed()) == list(attributes.changed()) == ["model.temperature"]
