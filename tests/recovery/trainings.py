"""What the workers of these tests train: scripts as a user would write them, by name, on counted samples."""

import copy
import hashlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from training import Job, data, make

import lockstep
from lockstep.gradients import bucket_set, layout
from lockstep.run.run import Run
from lockstep.strategies.sharded import plan, rounds

NUM_SAMPLES = 173
BATCH = 52
STEPS_PER_EPOCH = 4
BUCKET_BYTES = 600
GRANULE, BATCH_ELEMENTS, KERNEL_ELEMENTS = 32, 64, 32

Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Training:
    """A training by name: 173 samples a pass, in global batches of 52, four steps to a pass.

    `options` are those of `lockstep.start`. `poison` is a step and a sample that makes its lane's loss NaN there.
    `whole_norms`: batch norm has the statistics of the whole batch.
    """

    model: str = "mlp"
    script: str = "epochs"
    epochs: int = 2
    optimizer: str = "adamw"
    num_workers: int = 0
    autocast: bool = False
    lanes: int = 8
    poison: tuple[int, int] | None = None
    whole_norms: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def steps(self) -> int:
        return self.epochs * STEPS_PER_EPOCH

    def start(self) -> Run:
        """Small models are given several buckets, the first one too, and several batches of an update."""
        bucket_set.make_layout = partial(layout.make_layout, first_bucket_bytes=BUCKET_BYTES)
        plan.GRANULE, plan.BATCH_ELEMENTS, plan.KERNEL_ELEMENTS = GRANULE, BATCH_ELEMENTS, KERNEL_ELEMENTS
        rounds.ROWS, rounds.UNIT_BYTES, rounds.BUFFER_BYTES = 32, 256, 256
        usual = {"lanes": self.lanes, "seed": 3, "bucket_bytes": BUCKET_BYTES, "noise_every": 2}
        return lockstep.start(**usual | dict(self.options))


Point = Callable[..., None]


@dataclass
class Work:
    """One worker's training under way. `reach` is told where the script is, `between` is called before each step."""

    training: Training
    run: Run
    reach: Point
    between: Callable[[Run], None]
    notes: list[Any] = field(default_factory=list)
    loss_scale: float = 1.0
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    scheduler: torch.optim.lr_scheduler.LRScheduler = field(init=False)
    average: "Average" = field(init=False)

    def __post_init__(self) -> None:
        self.model, self.optimizer = make(Job(model=self.training.model, optimizer=self.training.optimizer))
        if self.training.whole_norms:
            self.model = lockstep.sync_batchnorm(self.model)
            _tell_passes(self.model, self.reach)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.average = Average(self.model)
        averages = {"average": self.average} if self.training.script == "averaging" else {}
        self.run.replicate(self.model, self.optimizer, scheduler=self.scheduler, **averages)

    def train(self) -> None:
        SCRIPTS[self.training.script](self)

    def compute(self, batch: Any) -> None:
        for x, y, index in self.run.lanes(batch):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.training.autocast):
                loss = F.cross_entropy(self.model(x), y) * self.loss_scale
            self.run.backward(loss * math.nan if self._is_poisoned(index) else loss)

    def _is_poisoned(self, index: torch.Tensor) -> bool:
        step, sample = self.training.poison or (-1, -1)
        return self.run.step == step and sample in index.tolist()

    def update(self) -> None:
        step = self.run.step - 1
        self.reach("before update", step)
        self.optimizer.step()
        self.reach("after update", step)
        self.optimizer.zero_grad()

    def step(self, batch: Any) -> None:
        self.between(self.run)
        self.compute(batch)
        self.update()
        self.scheduler.step()


class Average:
    """A running mean of a model's parameters, as users write it: not a module, found by its state_dict."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._count = model, 0
        self._mean = {name: copy.deepcopy(p.detach()) for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        self._count += 1
        for name, parameter in self._model.named_parameters():
            self._mean[name].lerp_(parameter, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count, "mean": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count, self._mean = state["count"], state["mean"]

    def digest(self) -> str:
        found = hashlib.sha256(str(self._count).encode())
        for mean in self._mean.values():
            found.update(mean.numpy().tobytes())
        return found.hexdigest()


def _tell_passes(model: nn.Module, reach: Point) -> None:
    """Tells that the second of its batch norms is reached, forward and backward: between two exchanges."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    norms[1].register_forward_pre_hook(lambda *_: reach("in forward"))
    norms[1].register_full_backward_hook(lambda *_: reach("in backward"))


class Counted(Dataset):  # type: ignore[type-arg]
    """Samples with a random augmentation, each with its index.

    What it reaches is no attribute of its own: a run looks at each batch through all that a data set holds, which would
    be what the test plans.
    """

    _reach: Point

    def __init__(self, reach: Point) -> None:
        self.x, self.y = data()
        type(self)._reach = staticmethod(reach)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Sample:
        self._reach("in loader")
        return self.x[index] + 0.1 * torch.randn(12), self.y[index], torch.tensor(index)


class CountedStream(IterableDataset):  # type: ignore[type-arg]
    """The same without indices: read in order."""

    def __init__(self, samples: Counted) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Sample]:
        return (self._samples[index] for index in range(len(self._samples)))


def _in_epochs(work: Work) -> None:
    samples, num_workers = Counted(work.reach), work.training.num_workers
    _train_on(work, DataLoader(samples, BATCH, shuffle=True, num_workers=num_workers))


def _on_a_stream(work: Work) -> None:
    _train_on(work, DataLoader(CountedStream(Counted(work.reach)), BATCH))


def _train_on(work: Work, loader: "DataLoader[Any]") -> None:
    sharded = work.run.shard(loader)
    for _ in work.run.epochs(work.training.epochs):
        for batch in sharded:
            work.step(batch)


def plain_batch(step: int) -> Sample:
    """Any worker makes it by itself from the number of the step."""
    x, y = data()
    start = step * BATCH % NUM_SAMPLES
    index = torch.arange(start, min(start + BATCH, NUM_SAMPLES))
    return x[index], y[index], index


def _on_plain_tensors(work: Work) -> None:
    """Whoever joins starts where the others are: at run.step."""
    for step in range(work.run.step, work.training.steps):
        work.step(plain_batch(step))


def _from_the_start(work: Work) -> None:
    """Whoever joins brings the first batch when the others are further."""
    for step in range(work.training.steps):
        work.step(plain_batch(step))


def _keeping_gradients(work: Work) -> None:
    """Two times run.lanes for one update."""
    sharded = work.run.shard(DataLoader(Counted(work.reach), BATCH, shuffle=True))
    for _ in work.run.epochs(work.training.epochs):
        for batch in sharded:
            work.between(work.run)
            work.compute(batch)
            if work.run.step % 2 == 0:
                work.update()


def _drawing_outside_of_lanes(work: Work) -> None:
    """Chance of the script's own, before and after every step and between epochs: it changes losses and weights."""
    sharded = work.run.shard(
        DataLoader(Counted(work.reach), BATCH, shuffle=True, num_workers=work.training.num_workers)
    )
    for _ in work.run.epochs(work.training.epochs):
        _drawn()
        for batch in sharded:
            work.loss_scale = 1.0 + _drawn()
            work.step(batch)
            _shake(work.model)
    work.notes.append(_drawn())


def _drawing_after_plain_steps(work: Work) -> None:
    for step in range(work.run.step, work.training.steps):
        work.step(plain_batch(step))
        _shake(work.model)
    work.notes.append(_drawn())


def _drawn() -> float:
    """From all generators that a script may draw from."""
    return float(torch.rand(())) + random.random() + float(numpy.random.rand())


@torch.no_grad()
def _shake(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(1e-3 * _drawn() * torch.randn(parameter.shape))


def _averaging(work: Work) -> None:
    """A scheduler and a running mean, whose count and values no digest of the run shows."""
    sharded = work.run.shard(DataLoader(Counted(work.reach), BATCH, shuffle=True))
    for _ in work.run.epochs(work.training.epochs):
        for batch in sharded:
            work.step(batch)
            work.average.update()
    work.notes += [work.average.digest(), work.scheduler.last_epoch, work.scheduler.get_last_lr()]


SCRIPTS: dict[str, Callable[[Work], None]] = {
    "epochs": _in_epochs,
    "stream": _on_a_stream,
    "plain": _on_plain_tensors,
    "from the start": _from_the_start,
    "keeping gradients": _keeping_gradients,
    "drawing": _drawing_outside_of_lanes,
    "drawing after plain steps": _drawing_after_plain_steps,
    "averaging": _averaging,
}
