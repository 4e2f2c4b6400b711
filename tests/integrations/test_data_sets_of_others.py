"""Data sets of Hugging Face and tables of pandas: another split or order is found, the same is the same."""

from typing import Any

import pytest
from torch.utils.data import Dataset

from lockstep.data.identity import made_of

pytestmark = pytest.mark.integrations

TEXTS = {"text": [f"t{number}" for number in range(300)], "label": [number % 7 for number in range(300)]}


class Rows(Dataset[Any]):
    def __init__(self, table: Any) -> None:
        self.table = table


def test_a_split_of_hugging_faces_data_set_is_the_same_with_a_seed_and_another_without() -> None:
    datasets = pytest.importorskip("datasets", reason="make test-integrations brings datasets")
    whole = datasets.Dataset.from_dict(TEXTS)
    seeded, again, other = (whole.train_test_split(0.2, seed=seed)["train"] for seed in (0, 0, 1))
    assert made_of(seeded) == made_of(again)
    assert made_of(seeded)["Dataset._indices"] != made_of(other)["Dataset._indices"]
    assert made_of(seeded.flatten_indices())["Dataset._data"] != made_of(other.flatten_indices())["Dataset._data"]


def test_one_inside_of_a_data_set_of_the_script_is_looked_at() -> None:
    datasets = pytest.importorskip("datasets", reason="make test-integrations brings datasets")
    whole = datasets.Dataset.from_dict(TEXTS)
    one, other = (made_of(Rows(whole.shuffle(seed=seed))) for seed in (0, 1))
    assert one["Rows.table._indices"] != other["Rows.table._indices"]
    assert one["Rows.table._data"] == other["Rows.table._data"]
    assert made_of(Rows(whole.to_iterable_dataset())) == {}


def test_a_table_of_pandas_in_another_order_is_another_one() -> None:
    pandas = pytest.importorskip("pandas", reason="make test-integrations brings pandas")
    table = pandas.DataFrame(TEXTS)
    assert made_of(Rows(table)) == made_of(Rows(table.copy()))
    assert made_of(Rows(table)) != made_of(Rows(table.sample(frac=1.0, random_state=0)))
    assert made_of(Rows(table))["Rows.table"].startswith("300: ['0', 't0', ")
