"""The benchmarks on large batches: what they compute from their trainings, and short versions of both that run."""

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep.optim.noise import Measured

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

needs_digits = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the digits are scikit-learn's")
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Imports a benchmark as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def printed_by(script: str, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def short_json() -> dict[str, Any]:
    return json.loads(printed_by("large_batches.py", "--seeds", "1", "--epochs", "1", "--factors", "2", "--json"))


@pytest.mark.soak
@needs_digits
def test_every_recipe_is_told_once_for_each_batch(short_json: dict[str, Any]) -> None:
    result = [(row["recipe"], row["batch"]) for row in short_json["rows"]]
    assert len(result) == len(set(result)) == 4 + 8


@pytest.mark.soak
@needs_digits
def test_twice_the_batch_takes_half_the_steps_of_the_same_epochs(short_json: dict[str, Any]) -> None:
    assert {(row["batch"], row["steps"]) for row in short_json["rows"]} == {(16, 1437 // 16), (32, 1437 // 32)}


@pytest.mark.soak
@needs_digits
def test_one_epoch_at_the_base_batch_learns_most_digits(short_json: dict[str, Any]) -> None:
    assert all(row["mean"] > 50 for row in short_json["rows"] if row["batch"] == 16)


@pytest.mark.soak
@needs_digits
def test_the_critical_batch_of_a_short_sweep_is_measured_and_predicted() -> None:
    result = printed_by("critical_batch.py", "--seeds", "1", "--batches", "32,64,256", "--target", "1.0")
    assert float(re.findall(r"measured: critical batch (\d+),", result)[0]) > 0
    assert re.findall(r"^ +(\d+) ", result, re.MULTILINE) == 2 * ["32", "64", "256"]  # swept, and predicted from
    last = result.splitlines()[-1]
    assert last.startswith("every prediction is within a factor of 2 of the measured critical batch: ")


def row_of(rows: ModuleType, recipe: str, batch: int, *accuracies: float) -> Any:
    return rows.Row(recipe, "SGD", batch, 1, accuracies, 0.0)


def test_a_row_keeps_the_accuracy_down_to_one_spread_below_the_base(load: Load) -> None:
    rows = load("large_batches")
    base = row_of(rows, "base", 16, 98.0, 99.0, 100.0)
    assert row_of(rows, "", 32, 98.01).keeps(base)
    assert not row_of(rows, "", 32, 97.99).keeps(base)


def test_a_base_without_spread_is_kept_by_a_row_with_one_wrong_image_more(load: Load) -> None:
    rows = load("large_batches")
    base = row_of(rows, "base", 16, 99.0, 99.0)
    assert row_of(rows, "", 32, 99.0 - 100 / 360).keeps(base)
    assert not row_of(rows, "", 32, 99.0 - 200 / 360).keeps(base)


def test_the_claim_counts_only_batches_at_which_the_unchanged_rate_loses(load: Load) -> None:
    rows = load("large_batches")
    base = row_of(rows, "base", 16, 99.0, 99.0)
    unchanged = [row_of(rows, rows.AGAINST, batch, right) for batch, right in ((32, 99.0), (64, 90.0), (128, 80.0))]
    linear = [row_of(rows, rows.CLAIMED, batch, right) for batch, right in ((32, 99.0), (64, 99.0), (128, 80.0))]
    assert rows.claim([*unchanged, *linear], {"SGD": base}) == ([64, 128], [64])


def test_the_table_shows_a_row_against_the_base_of_its_optimizer(load: Load) -> None:
    rows = load("large_batches")
    base = row_of(rows, "base", 16, 98.0, 99.0, 100.0)
    shown = rows.line(row_of(rows, "SGD, linear", 32, 97.0, 97.5), {"SGD": base})
    assert shown.split() == ["32", "1", "SGD,", "linear", "97.25", "±", "0.35", "0.0000", "-1.75", "lost"]


def test_a_noise_scale_that_stays_is_the_critical_batch_whatever_the_batch(load: Load) -> None:
    critical = load("critical_batch")
    parts = [Measured(gradient_square=g, variance=50 * g) for g in (100.0, 3.0, 0.01)]
    assert critical.over_progress(parts, batch=8) == pytest.approx(50)
    assert critical.over_progress(parts, batch=512) == pytest.approx(50)


def test_parts_count_by_the_progress_that_their_steps_make(load: Load) -> None:
    critical = load("critical_batch")
    # Noise scales 10 and 30 at batch 10: a step makes 1/2 and 1/4 of the progress of one without noise.
    parts = [Measured(gradient_square=7.0, variance=70.0), Measured(gradient_square=0.1, variance=3.0)]
    assert critical.over_progress(parts, batch=10) == pytest.approx((10 / 2 + 30 / 4) / (1 / 2 + 1 / 4))


def test_a_part_whose_gradient_drowns_in_noise_does_not_make_the_critical_batch_infinite(load: Load) -> None:
    critical = load("critical_batch")
    parts = [Measured(gradient_square=1.0, variance=10.0), Measured(gradient_square=0.0, variance=10.0)]
    assert critical.over_progress(parts, batch=10) == pytest.approx((5 + 10) / (1 / 2))
