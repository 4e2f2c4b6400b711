"""The critical batch measured by a sweep over batches, and predicted from the gradient's noise in a training run.

    python benchmarks/critical_batch.py [--seeds 5] [--batches 8,16,32,64,128,256,512] [--target 0.1] [--json]

Measured: the samples that plain SGD needs until the loss on 512 training images is below the target, at every batch
with the best constant rate of a grid, and E = E_min·(1 + B/B_crit) through them. Predicted: from trainings of one batch
each, at the rate found for it, every step cut into 8 lanes. See Note [Average over progress]. Nothing is timed.

Note [Average over progress]
The noise scale grows during training, and E and S count the whole of it. In the model of McCandlish et al. 2018 a step
without noise makes the progress 1, one with the batch B at its best rate only ds = 1/(1 + B_noise/B), so
S = ∫ (1 + B_noise/B) ds and B_crit = ∫ B_noise ds / ∫ ds: the mean of the noise scale over progress, not over steps
(steps late in training make less progress) and not the ratio of the averages of a whole run (in which the large
gradients at the beginning outweigh all others). With V and G the variance and the gradient's square of one tenth of the
training, both averaged over the seeds, and B_noise = V/G,

    B_crit = Σ V/(G + V/B) / Σ G/(G + V/B)

which needs no division by a G that is near zero.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from large_batches_digits import Digits, digits, loss_on, network, order_of
from torch import Tensor

from lockstep.optim.noise import Measured, measure
from lockstep.optim.noise.critical_batch import Fit, fit_samples

RATES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
NUM_LANES = 8
NUM_PARTS = 10
MOST_EPOCHS = 30
LOOKED_AT = 512  # training images on which the loss is looked at
BETWEEN_LOOKS = 64  # samples, or one step where a batch is larger


@dataclass(frozen=True)
class Reached:
    """What a batch needs to come to the target with its best rate: samples, the mean over the seeds."""

    batch: int
    rate: float
    samples: float


@dataclass(frozen=True)
class Predicted:
    """The critical batch as a training of `batch` samples a step lets expect."""

    batch: int
    rate: float
    steps: int
    critical: float
    early: float
    late: float


Found = TypeVar("Found", Reached, Predicted)


class Training:
    """Plain SGD, step by step, on one seed's weights and order of samples."""

    def __init__(self, data: Digits, batch: int, rate: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.data, self.batch, self.rate = data, batch, rate
        self.model = network()
        self.parameters = list(self.model.parameters())
        self.order = order_of(len(data.labels), MOST_EPOCHS, seed)
        self.samples = 0

    def step(self, num_lanes: int = 1) -> list[list[Tensor]]:
        """One step on the mean of the lanes' gradients, which are given back."""
        indices = self.order[self.samples : self.samples + self.batch]
        lanes = [self._gradient(share) for share in indices.chunk(num_lanes)]
        with torch.no_grad():
            for parameter, *gradients in zip(self.parameters, *lanes, strict=True):
                parameter -= self.rate * torch.stack(gradients).mean(0)
        self.samples += self.batch
        return lanes

    def has_reached(self, target: float) -> bool:
        return loss_on(self.model, self.data.images[:LOOKED_AT], self.data.labels[:LOOKED_AT]) < target

    def _gradient(self, indices: Tensor) -> list[Tensor]:
        loss = F.cross_entropy(self.model(self.data.images[indices]), self.data.labels[indices])
        return list(torch.autograd.grad(loss, self.parameters))


def samples_to(target: float, training: Training, most: float) -> float:
    """The samples after which the loss was first below the target; infinite if that takes more than `most`."""
    most = min(most, len(training.order) - training.batch)
    looked = 0
    while training.samples < most:
        training.step()
        if training.samples - looked >= BETWEEN_LOOKS:
            looked = training.samples
            if training.has_reached(target):
                return float(training.samples)
    return math.inf


def best_of_grid(data: Digits, batch: int, seeds: int, target: float) -> Reached:
    """A rate is given up as soon as one seed takes twice as long as the best rate so far does in the mean."""
    best = Reached(batch, math.nan, math.inf)
    for rate in sorted(RATES, key=lambda rate: abs(math.log(rate / 0.1))):
        samples: list[float] = []
        while len(samples) < seeds and math.inf not in samples:
            samples.append(samples_to(target, Training(data, batch, rate, len(samples)), 2 * best.samples))
        if statistics.fmean(samples) < best.samples:
            best = Reached(batch, rate, statistics.fmean(samples))
    return best


def sweep(data: Digits, batches: Sequence[int], seeds: int, target: float) -> Iterator[Reached]:
    for batch in batches:
        yield best_of_grid(data, batch, seeds, target)


def measured_run(training: Training, target: float) -> list[Measured]:
    """What the lanes of every step say until the target is reached."""
    found = []
    while not training.has_reached(target) and training.samples + training.batch <= len(training.order):
        found.append(measured_step(training.step(NUM_LANES), training.batch / NUM_LANES))
    return found


def measured_step(lanes: list[list[Tensor]], weight: float) -> Measured:
    flat = [torch.cat([gradient.flatten() for gradient in lane]) for lane in lanes]
    squares = {number: float(lane.square().sum()) for number, lane in enumerate(flat)}
    return measure(squares, dict.fromkeys(squares, weight), float(torch.stack(flat).mean(0).square().sum()))


def parts_of(runs: Sequence[Sequence[Measured]]) -> list[Measured]:
    """The mean of every tenth of the training over all runs; gradients that are below zero by chance count as zero."""
    parts = []
    for number in range(NUM_PARTS):
        part = [m for run in runs for m in run[len(run) * number // NUM_PARTS : len(run) * (number + 1) // NUM_PARTS]]
        if part:  # a training of fewer than ten steps has empty tenths
            means = (statistics.fmean(m.gradient_square for m in part), statistics.fmean(m.variance for m in part))
            parts.append(Measured(*(max(mean, 0.0) for mean in means)))
    return parts


def over_progress(parts: Sequence[Measured], batch: float) -> float:
    """See Note [Average over progress]."""
    steps = [part.gradient_square + part.variance / batch for part in parts]
    noise = math.fsum(part.variance / step for part, step in zip(parts, steps, strict=True))
    return noise / math.fsum(part.gradient_square / step for part, step in zip(parts, steps, strict=True))


def noise_of(parts: Sequence[Measured]) -> float:
    gradient_square = math.fsum(part.gradient_square for part in parts)
    return math.fsum(part.variance for part in parts) / gradient_square if gradient_square else math.inf


def predict(data: Digits, reached: Reached, seeds: int, target: float) -> Predicted:
    runs = [measured_run(Training(data, reached.batch, reached.rate, seed), target) for seed in range(seeds)]
    parts = parts_of(runs)
    third = max(len(parts) // 3, 1)
    steps = round(statistics.fmean(map(len, runs)))
    critical = over_progress(parts, reached.batch)
    return Predicted(reached.batch, reached.rate, steps, critical, noise_of(parts[:third]), noise_of(parts[-third:]))


def predictions(data: Digits, sweep: Sequence[Reached], seeds: int, target: float) -> Iterator[Predicted]:
    """From trainings with batches whose lanes hold enough, and that are no larger than a quarter of the data."""
    for reached in sweep:
        if 4 * NUM_LANES <= reached.batch <= len(data.labels) // 4:
            yield predict(data, reached, seeds, target)


def find(data: Digits, batches: Sequence[int], seeds: int, target: float) -> tuple[list[Reached], Fit, list[Predicted]]:
    """The sweep, the curve through it and the predictions; every line is told on stderr as soon as it is there."""
    swept = [tell(reached) for reached in sweep(data, batches, seeds, target)]
    unreached = [reached.batch for reached in swept if math.isinf(reached.samples)]
    if unreached:
        raise SystemExit(f"batches {unreached} did not come to a loss of {target}; raise --target or leave them out")
    fit = fit_samples({reached.batch: reached.samples for reached in swept})
    return swept, fit, [tell(predicted) for predicted in predictions(data, swept, seeds, target)]


def tell(found: Found) -> Found:
    print(found, file=sys.stderr, flush=True)
    return found


def show(swept: Sequence[Reached], fit: Fit, predicted: Sequence[Predicted]) -> None:
    print("batch  rate    samples  steps  the curve")
    for one in swept:
        steps = one.samples / one.batch
        print(f"{one.batch:5}  {one.rate:<6g}  {one.samples:7.0f}  {steps:5.0f}  {fit.predict(one.batch):9.0f}")
    print(f"\nmeasured: critical batch {fit.critical:.0f}, least samples {fit.least:.0f}, off by {fit.worst_error:.0%}")
    print("\nbatch  rate    steps  noise early  noise late  predicted  predicted / measured")
    for one in predicted:
        ends = f"{one.early:11.0f}  {one.late:10.0f}"
        ratio = one.critical / fit.critical
        print(f"{one.batch:5}  {one.rate:<6g}  {one.steps:5}  {ends}  {one.critical:9.0f}  {ratio:20.2f}")
    within = all(0.5 <= one.critical / fit.critical <= 2 for one in predicted)
    print(f"\nevery prediction is within a factor of 2 of the measured critical batch: {'yes' if within else 'NO'}")


def show_json(swept: Sequence[Reached], fit: Fit, predicted: Sequence[Predicted]) -> None:
    told = {
        "measured": asdict(fit),
        "sweep": [asdict(one) for one in swept],
        "predicted": [asdict(p) for p in predicted],
    }
    print(json.dumps(told))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batches", default="8,16,32,64,128,256,512")
    parser.add_argument("--target", type=float, default=0.1, help="the loss to come to")
    parser.add_argument("--json", action="store_true", help="one JSON object in the place of the tables")
    return parser.parse_args()


def main() -> None:
    torch.set_num_threads(1)
    arguments = parse()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    found = find(digits(), batches, arguments.seeds, arguments.target)
    (show_json if arguments.json else show)(*found)


if __name__ == "__main__":
    main()
