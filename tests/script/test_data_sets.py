"""Settings of data sets that a script changes once are compared after a resume."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lockstep.script import owners
from lockstep.script.restart.data_sets import (
    DataSetContents,
    DataSetSettings,
    contents_of_data_sets,
    texts_of_data_sets,
    unset,
)
from lockstep.script.restart.texts import text_of


class Scaled(Dataset[Any]):
    def __init__(self) -> None:
        self.scale, self.transform, self.files, self.read = 1.0, abs, ["a"], 0
        self.weights, self.augment = torch.zeros(2), SimpleNamespace(strength=1)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        self.count()
        return self.scale * index

    def count(self) -> None:
        self.read += 1


def made() -> tuple[Scaled, DataSetSettings]:
    data_set = Scaled()
    settings = DataSetSettings(lambda: texts_of_data_sets({0: data_set}))
    settings.note_first()
    return data_set, settings


def test_what_a_data_set_is_set_to_as_text() -> None:
    data_set = Scaled()
    data_set[1]
    assert texts_of_data_sets({3: data_set}) == {
        "Scaled.scale (the data set of loader 3)": "1.0",
        "Scaled.transform (the data set of loader 3)": "abs",
        "Scaled.files (the data set of loader 3)": "a list of 1",
        "Scaled.augment (the data set of loader 3)": "SimpleNamespace",
        "Scaled.augment.strength (the data set of loader 3)": "1",
    }


def test_data_sets_inside_of_others_are_looked_at() -> None:
    whole = ConcatDataset([TensorDataset(torch.zeros(1)), Subset(Scaled(), [0, 1])])
    names = texts_of_data_sets({0: whole})
    assert "ConcatDataset.datasets[1].dataset.scale (the data set of loader 0)" in names


def test_one_that_has_its_first_setting_again_is_named() -> None:
    data_set, settings = made()
    data_set.scale, data_set.transform = 2.0, round  # type: ignore[assignment]
    assert settings.begin(at_start=True) == []
    new, resumed = made()
    resumed.load(settings.state())
    new.transform = round  # type: ignore[assignment]
    assert resumed.begin(at_start=False) == [unset("Scaled.scale (the data set of loader 0)", "1.0", "2.0")]
    assert resumed.begin(at_start=False) == []


@pytest.mark.parametrize("at_start", [True, False])
def test_one_that_is_set_as_before_or_to_something_new_is_not(at_start: bool) -> None:
    data_set, settings = made()
    data_set.scale = 2.0
    settings.begin(at_start=True)
    for scale in (2.0, 3.0):
        new, resumed = made()
        resumed.load(settings.state())
        new.scale = scale
        assert resumed.begin(at_start=at_start) == []
        assert resumed.state().keys() == settings.state().keys(), "it is known to have changed"


def test_what_is_set_between_passes_does_not_count_until_one_begins() -> None:
    data_set, settings = made()
    settings.begin(at_start=True)
    data_set.scale = 2.0  # for an evaluation
    assert settings.begin(at_start=False) == []
    assert settings.state() == {}


def test_one_that_comes_and_goes_is_left_alone() -> None:
    data_set, settings = made()
    for scale in (1.0, 2.0, 1.0, 2.0):
        data_set.scale = scale
        settings.begin(at_start=True)
    assert settings.state() == {}


def double(x: float) -> float:
    return 2 * x


def test_the_texts_of_functions_and_modules() -> None:
    assert text_of(double).startswith("double (line ")  # type: ignore[union-attr]
    assert text_of(partial(max, 1, key=abs)) == "partial(max, 1, key=abs)"
    assert text_of(nn.CrossEntropyLoss(label_smoothing=0.5)) != text_of(nn.CrossEntropyLoss())
    assert text_of(torch.zeros(2)) is None
    assert text_of([1, 2]) == "a list of 2"
    assert text_of(Scaled()) == "Scaled"
    assert text_of("a") == "'a'"


def test_the_source_of_a_class_of_the_script_is_read_and_not_that_of_pythons_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []
    monkeypatch.setattr(owners, "methods_of", lambda path, name: read.append(name) or ())
    assert list(owners.own_methods(Scaled())) == []
    assert read == ["Scaled"]


class Listed(Dataset[int]):
    """Shuffled by its script; what it has read it keeps by itself."""

    def __init__(self) -> None:
        self.order, self.labels, self.cache = list(range(5000)), torch.zeros(4, 2), [0, 1, 2]

    def __getitem__(self, index: int) -> int:
        self.cache[index % 3] = index
        return self.order[index]


def held(data: Listed) -> DataSetContents:
    return DataSetContents(lambda: contents_of_data_sets({0: data}))


def _shuffle(data: Listed) -> None:
    data.order.reverse()


def _label(data: Listed) -> None:
    data.labels[1] = 3.0


def _grow(data: Listed) -> None:
    data.order = list(range(5001))


def _read(data: Listed) -> None:
    data[7]


@pytest.mark.parametrize(
    ("change", "name", "noted_at_start"),
    [(_shuffle, "order", True), (_label, "labels", True), (_grow, "order", False), (_read, None, False)],
)
def test_contents_that_begin_anew_are_named(
    change: Callable[[Listed], None], name: str | None, noted_at_start: bool
) -> None:
    data = Listed()
    calm = held(data)
    calm.note_first()
    change(data)
    saved = calm.state()
    assert list(saved) == ([] if name is None else [f"Listed.{name} (the data set of loader 0)"])
    for at_start, has_joined in ((False, False), (False, True), (True, True)):
        anew = held(Listed())
        anew.note_first()
        anew.load(saved)
        assert [one.is_wrong for one in anew.begin(at_start=at_start, has_joined=has_joined)] == [True] * len(saved)
        assert anew.begin(at_start=at_start, has_joined=has_joined) == [], "once"
    between = held(Listed())
    between.load(saved)
    assert [one.is_wrong for one in between.begin(at_start=True, has_joined=False)] == [False] * noted_at_start
    same = held(data)
    same.load(saved)
    assert same.begin(at_start=False, has_joined=True) == []


def test_what_begins_anew_is_in_a_snapshot_that_is_taken_before_training_goes_on() -> None:
    data = Listed()
    calm = held(data)
    calm.note_first()
    _shuffle(data)
    saved = calm.state()
    anew = held(Listed())
    anew.load(saved)
    assert anew.state() == saved
