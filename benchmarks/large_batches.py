"""What a larger batch does to the accuracy, and what the rules for the rate do about it, on scikit-learn's digits.

    python benchmarks/large_batches.py [--seeds 5] [--epochs 30] [--factors 4,8,16,32,64] [--json]
    python benchmarks/large_batches.py --base 4 --factors 16,32,64
    python benchmarks/large_batches.py --tune

Every row trains the same network for the same epochs, so a batch 16 times as large takes 1/16 of the steps. Rates are
tuned once, at the base batch (`--tune`, which never sees the test images), and then only scaled. A row keeps the
accuracy if its mean over the seeds is at most one spread of the base (standard deviation over the seeds, but no less
than one test image) below the mean of its optimizer's base. One process, one thread; nothing is timed.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from large_batches_digits import NUM_TEST, Digits, digits, loss_on, network, order_of, percent_right, without_test
from large_batches_recipes import BASE_BATCH, OPTIMIZERS, RECIPES, SMALL_BASE_BATCH, Recipe, bases, recipes, schedule
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

ONE_IMAGE = 100 / NUM_TEST
CLAIMED = "SGD, linear, warm-up"
AGAINST = "SGD, rate unchanged"


@dataclass(frozen=True)
class Row:
    """One recipe at one batch: accuracy in per cent, its mean and its standard deviation over the seeds."""

    recipe: str
    optimizer: str
    batch: int
    steps: int
    accuracies: tuple[float, ...]
    train_loss: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float:
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0

    def keeps(self, base: "Row") -> bool:
        return self.mean >= base.mean - max(base.spread, ONE_IMAGE)


Training = tuple[Optimizer, LRScheduler]


def train(model: nn.Module, training: Training, data: Digits, batches: Sequence[torch.Tensor]) -> None:
    """The model after one step on each batch, a tensor of indices. Stops where the loss is no longer finite."""
    optimizer, scheduler = training
    for indices in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.images[indices]), data.labels[indices])
        if not loss.isfinite():
            return
        loss.backward()
        optimizer.step()
        scheduler.step()


def batches_of(data: Digits, batch: int, epochs: int, seed: int) -> list[torch.Tensor]:
    """The epochs' samples cut into whole batches; what is left at the very end is not used."""
    order = order_of(len(data.labels), epochs, seed)
    return [order[begin : begin + batch] for begin in range(0, len(order) - batch + 1, batch)]


def measure(recipe: Recipe, batch: int, base: int, epochs: int, seeds: int, data: Digits) -> Row:
    """Trains once for each seed; a seed decides the first weights and the order of the samples."""
    accuracies, losses = [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model, batches = network(), batches_of(data, batch, epochs, seed)
        train(model, recipe.prepare(model, batch, base, len(batches)), data, batches)
        accuracies.append(percent_right(model, data.judged_images, data.judged_labels))
        losses.append(loss_on(model, data.images, data.labels))
    return Row(recipe.name, recipe.optimizer, batch, len(batches), tuple(accuracies), statistics.fmean(losses))


def table(base: int, factors: Sequence[int], epochs: int, seeds: int, data: Digits) -> Iterator[Row]:
    """The bases first, then every recipe at every factor, each as soon as it is there."""
    for recipe in bases(base):
        yield measure(recipe, base, base, epochs, seeds, data)
    for factor in factors:
        for recipe in recipes(base):
            yield measure(recipe, factor * base, base, epochs, seeds, data)


def line(row: Row, base_rows: dict[str, Row]) -> str:
    base = base_rows[row.optimizer]
    verdict = "" if row is base else f"{row.mean - base.mean:+7.2f}  {'kept' if row.keeps(base) else 'lost'}"
    spread = f"{row.mean:6.2f} ± {row.spread:5.2f}"
    return f"{row.batch:5}  {row.steps:5}  {row.recipe:40}  {spread}  {row.train_loss:8.4f}  {verdict}".rstrip()


def verdicts(rows: Sequence[Row], base_rows: dict[str, Row]) -> dict[str, int | None]:
    """For every recipe the largest batch up to which it keeps the accuracy of its base at every batch tried."""
    kept: dict[str, int | None] = {}
    for recipe in RECIPES:
        tried = sorted((row for row in rows if row.recipe == recipe.name), key=lambda row: row.batch)
        if not tried:
            continue
        kept[recipe.name] = None
        for row in tried:
            if not row.keeps(base_rows[row.optimizer]):
                break
            kept[recipe.name] = row.batch
    return kept


def claim(rows: Sequence[Row], base_rows: dict[str, Row]) -> tuple[list[int], list[int]]:
    """The batches at which the unchanged rate loses the accuracy; those of them at which the linear rule keeps it."""
    lost = [row.batch for row in rows if row.recipe == AGAINST and not row.keeps(base_rows[row.optimizer])]
    held = [
        row.batch for row in rows if row.recipe == CLAIMED and row.batch in lost and row.keeps(base_rows[row.optimizer])
    ]
    return lost, held


def in_words(batches: Iterable[int]) -> str:
    return ", ".join(map(str, batches)) or "no batch"


def show(base: int, factors: Sequence[int], epochs: int, seeds: int) -> None:
    print(f"batch  steps  {'recipe':40}  accuracy %      train loss  against base", flush=True)
    rows: list[Row] = []
    base_rows: dict[str, Row] = {}
    for row in table(base, factors, epochs, seeds, digits()):
        base_rows.setdefault(row.optimizer, row)
        rows.append(row)
        print(line(row, base_rows), flush=True)
    print("\nkeeps the accuracy of its base up to batch:")
    for name, batch in verdicts(rows, base_rows).items():
        print(f"  {name:40}  {batch or 'none of these'}")
    lost, held = claim(rows, base_rows)
    print(f"\n{AGAINST}: loses the accuracy at {in_words(lost)}.")
    print(f"{CLAIMED}: of these, keeps it at {in_words(held)}.")


def show_json(base: int, factors: Sequence[int], epochs: int, seeds: int) -> None:
    """One JSON object with all; how far it is goes to stderr."""
    rows = []
    for row in table(base, factors, epochs, seeds, digits()):
        rows.append(row)
        print(f"batch {row.batch}: {row.recipe}", file=sys.stderr, flush=True)
    base_rows = {row.optimizer: row for row in reversed(rows) if row.batch == base}
    lost, held = claim(rows, base_rows)
    told = [as_json(row, base_rows[row.optimizer]) for row in rows]
    kept = verdicts(rows, base_rows)
    print(json.dumps({"rows": told, "kept_up_to": kept, "unchanged_loses": lost, "linear_keeps": held}))


def as_json(row: Row, base: Row) -> dict[str, Any]:
    """A loss that is not finite, which JSON cannot say, is null."""
    loss = row.train_loss if math.isfinite(row.train_loss) else None
    return {**asdict(row), "train_loss": loss, "mean": row.mean, "spread": row.spread, "kept": row.keeps(base)}


def tune(base: int, epochs: int, seeds: int) -> None:
    """The accuracy of each optimizer at the base batch over its grid, on training images that were held out."""
    data = without_test(digits())
    for name, tuned in OPTIMIZERS.items():
        for value in tuned.tried.get(base, ()):
            tried = Tried(f"{name}, {tuned.called} {value:g}", name, value=value)
            row = measure(tried, base, base, epochs, seeds, data)
            used = "  <- used" if value == tuned.values[base] else ""
            print(f"{row.recipe:20}  {row.mean:6.2f} ± {row.spread:5.2f}  {row.train_loss:8.4f}{used}", flush=True)


@dataclass(frozen=True)
class Tried(Recipe):
    """A recipe of the base batch with another value than the one found."""

    value: float = 0.0

    def prepare(self, model: nn.Module, batch: int, base: int, num_steps: int) -> Training:
        optimizer = OPTIMIZERS[self.optimizer].make(model, self.value)
        return optimizer, schedule(optimizer, num_steps, 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--base", type=int, default=BASE_BATCH, choices=(BASE_BATCH, SMALL_BASE_BATCH))
    parser.add_argument("--factors", default="4,8,16,32,64", help="how many times the base batch, e.g. 16,32")
    parser.add_argument("--tune", action="store_true", help="show how the rates of the base batch were found")
    parser.add_argument("--json", action="store_true", help="one JSON object in the place of the table")
    return parser.parse_args()


def main() -> None:
    torch.set_num_threads(1)
    arguments = parse()
    factors = [int(factor) for factor in arguments.factors.split(",")]
    if arguments.tune:
        tune(arguments.base, arguments.epochs, arguments.seeds)
    else:
        (show_json if arguments.json else show)(arguments.base, factors, arguments.epochs, arguments.seeds)


if __name__ == "__main__":
    main()
