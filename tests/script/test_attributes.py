"""Numbers in the attributes of models and optimizers that training has changed go on; others are left alone."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.script.restart.attributes import ModelAttributes, renewed
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
    assert attributes.changed(in_evaluation=False) == ({}, {})
    attributes.note_first()
    assert attributes.begin(at_start=False) == []
    assert attributes.changed(in_evaluation=False) == ({}, {})
    train(model, optimizer)
    model.train(mode=False)
    saved = attributes.changed(in_evaluation=False)
    assert sorted(saved[0]) == [
        "model.best", "model.drop.p", "model.is_warm", "model.phase", "model.temperature", "optimizer.updates",
    ]  # fmt: skip

    new, its_optimizer, others = made()
    others.load(*saved)
    assert (new.temperature, new.best, new.drop.p, its_optimizer.updates) == (0.7, float("inf"), 0.25, 3)
    assert (new.phase, new.is_warm, new.training, new.width) == ("second", True, True, 4)
    others.note_first()
    assert others.begin(at_start=False) == []
    assert others.changed(in_evaluation=False) == saved, "those of before go on"


def test_a_number_that_the_script_sets_anew_is_named_and_one_that_it_computes_is_not() -> None:
    model, optimizer, attributes = made()
    attributes.note_first()
    train(model, optimizer)
    saved = attributes.changed(in_evaluation=False)

    new, its_optimizer, others = made()
    others.load(*saved)
    new.temperature, its_optimizer.updates = 2.0, 4
    (found,) = others.begin(at_start=False)
    assert found == renewed("model.temperature", 2.0, 0.7, goes_on=True)
    assert "model.temperature is 2.0 and was 0.7" in str(found)
    assert others.begin(at_start=False) == []


def test_of_one_that_no_code_goes_on_from_it_is_not_known_whether_it_is_computed() -> None:
    model, optimizer, attributes = made()
    attributes.note_first()
    train(model, optimizer)
    new, _, others = made()
    others.load(*attributes.changed(in_evaluation=False))
    new.drop.p = 0.5
    assert others.begin(at_start=False) == [renewed("model.drop.p", 0.5, 0.25, goes_on=False)]


class Settings:
    def __init__(self) -> None:
        self.rate = 0.5


class NetConfig:
    """As of a library: its name says what it is."""

    __module__ = "torch.configs"

    def __init__(self) -> None:
        self.rate, self._inner = 0.5, SimpleNamespace(rate=0.5)


def test_settings_that_a_model_holds_go_on_too_one_deep() -> None:
    model, _, attributes = made()
    others = made()
    for one in (model, others[0]):
        one.settings, one.space = Settings(), SimpleNamespace(rate=0.5)  # type: ignore[assignment]
        one.table, one.config = {"rate": 0.5, 3: 0.5}, NetConfig()  # type: ignore[assignment]
        one.data = TensorDataset(torch.zeros(1))  # type: ignore[assignment]
    attributes.note_first()
    model.settings.rate = model.space.rate = model.config.rate = model.config._inner.rate = 0.25
    model.table |= {"rate": 0.25, 3: 0.25}  # type: ignore[operator]
    model.data.seen = 3
    saved = attributes.changed(in_evaluation=False)
    assert sorted(saved[0]) == ["model.config.rate", "model.settings.rate", "model.space.rate", "model.table.rate"]
    others[2].load(*saved)
    new: Any = others[0]
    assert new.settings.rate == new.space.rate == new.config.rate == new.table["rate"] == 0.25
    assert new.table[3] == 0.5


class Cached(nn.Module):
    """Three numbers that are stored together with something that no snapshot has, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen, self.stage, self.counted, self.made, self.table = 0, 0, 0, 0, None
        self.items: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.look_up(len(x))

    def look_up(self, size: int) -> torch.Tensor:
        if size > self.seen:
            self.seen, self.table = size, torch.zeros(size)
        return self.table[:size]  # type: ignore[index]

    def enter(self, stage: int) -> None:
        self.stage, self.items = stage, [stage]

    def count(self) -> None:
        self.counted += 1

    def make(self) -> None:
        self.made = 1
        self.register_buffer("late", torch.zeros(1))


def test_what_is_stored_with_something_unsaved_is_made_again_or_refused() -> None:
    models, others, model, new = Models(), Models(), Cached(), Cached()
    models.add(model, [], {})
    others.add(new, [], {})
    attributes, resumed = ModelAttributes(models), ModelAttributes(others)
    attributes.note_first()
    model(torch.ones(3))
    model.enter(2)
    model.count()
    model.make()
    put_back, compared = attributes.changed(in_evaluation=False)
    assert put_back == {"model.counted": [0, 1]}
    assert compared == {"model.stage": [0, 2], "model.made": [0, 1]}

    resumed.load(put_back, compared)
    resumed.note_first()
    assert (new.seen, new.stage, new.counted, new.made) == (0, 0, 1, 0)
    assert resumed.changed(in_evaluation=False) == (put_back, {}), "what is as at first is not saved as changed"
    new.make()
    (stage,) = resumed.begin(at_start=True)
    assert stage == renewed("model.stage", 0, 2, goes_on=False, was_put_back=False)
    assert stage.is_wrong
    assert "model.stage is 0 and was 2" in str(stage)
    assert "if epoch >= 3" in str(stage)


def test_a_snapshot_in_an_evaluation_has_the_switches_of_the_training() -> None:
    model, optimizer, attributes = made()
    attributes.note_first()
    model.is_warm = True
    attributes.begin(at_start=True)
    train(model, optimizer)
    model.is_warm, model.phase = False, "evaluation"
    put_back, _ = attributes.changed(in_evaluation=True)
    assert put_back["model.is_warm"] == [False, True]
    assert "model.phase" not in put_back
    assert put_back["model.temperature"] == [2.0, 0.7]
    assert attributes.changed(in_evaluation=False)[0]["model.phase"] == ["first", "evaluation"]


def test_a_model_is_gone_through_once_for_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, looks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    models = Models()
    models.add(model, [], {})
    attributes = ModelAttributes(models)
    monkeypatch.setattr(model, "named_modules", lambda: looks.append(0) or iter([("", model)]))
    for at_start in (True, False, False, False, True):
        assert attributes.begin(at_start=at_start) == []
    assert len(looks) == 2


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
        attributes.note_first()
        train(model, optimizer)
        new, _, others = made()
        others.load(*attributes.changed(in_evaluation=False))
        new.temperature = 2.0
        found[at_start] = others.begin(at_start=at_start)
    assert found == {True: [], False: [renewed("model.temperature", 2.0, 0.7, goes_on=True)]}


def test_a_snapshot_that_is_loaded_while_training_goes_on() -> None:
    model, optimizer, attributes = made()
    attributes.note_first()
    train(model, optimizer)
    saved = attributes.changed(in_evaluation=False)
    model.temperature = 0.1
    attributes.load(*saved)
    assert model.temperature == 0.7
    assert attributes.begin(at_start=False) == []
    assert attributes.changed(in_evaluation=False) == saved


@pytest.mark.parametrize("name", ["model.gone", "optimizer2.updates", ""])
def test_a_number_of_something_that_is_not_there_is_left_out(name: str) -> None:
    model, _, attributes = made()
    attributes.load({name: [1, 2]}, {})
    assert attributes.begin(at_start=False) == []
    assert model.temperature == 2.0


def test_a_compiled_model_has_the_names_of_a_plain_one() -> None:
    model, _, attributes = made()
    attributes.note_first()
    model.temperature = 1.0
    models = Models()
    models.add(torch.compile(model, backend="eager"), [], {})
    compiled = ModelAttributes(models)
    compiled.note_first()
    model.temperature = 0.5
    assert (
        list(compiled.changed(in_evaluation=False)[0])
        == list(attributes.changed(in_evaluation=False)[0])
        == ["model.temperature"]
    )
