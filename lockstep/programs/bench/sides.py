"""Ways to train that are measured against each other, and what shows that two of them compute the same.

All start from the same weights, drawn on the CPU, and train on the same batches, which are in the device's memory, with
AdamW at its defaults: one update for each global batch. The loss carries its own autocast.
"""

import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from lockstep.chance import drawing_from, fold
from lockstep.lanes import share
from lockstep.programs.bench.plan import NUM_BATCHES
from lockstep.programs.models import Batch, Workload

Forward = Callable[[Batch], Tensor]
Named = Mapping[str, Tensor]
OptimizerStates = Mapping[Tensor, Mapping[str, Any]]

NUM_STEPS = 3  # from so many steps evidence is taken


def part_of(batch: Batch, number: int, parts: int) -> Batch:
    own = share(len(batch[0]), number, parts)
    return batch[0][own.start : own.stop], batch[1][own.start : own.stop]


@dataclass(frozen=True)
class TrainingKit:
    """What a side is made of: the model and the global batches, on the device."""

    workload: Workload
    model: nn.Module
    batches: Sequence[Batch]

    def forward(self, model: Callable[..., Any]) -> Forward:
        """The loss of a batch by `model`, which is the kit's own or wraps it."""
        loss = self.workload.loss
        return lambda batch: loss(model, batch)  # type: ignore[arg-type]

    def cut(self, rank: int, size: int) -> "TrainingKit":
        """The same with a worker's shares of the batches."""
        return replace(self, batches=[part_of(batch, rank, size) for batch in self.batches])


def make_kit(workload: Workload, device: torch.device | str = "cpu") -> TrainingKit:
    """Equal in every process that makes it."""
    with drawing_from(fold(0, "bench", "weights")):
        model = workload.make_model()
    generator = torch.Generator().manual_seed(fold(0, "bench", "data"))
    batches = [workload.make_batch(generator) for _ in range(NUM_BATCHES)]
    return TrainingKit(workload, model.to(device), [(x.to(device), y.to(device)) for x, y in batches])


class TrainingSide(ABC):
    """One way to train; `step(number)` is the whole update with batch `number`."""

    def __init__(self, kit: TrainingKit, optimizer: Optimizer) -> None:
        self.model, self.optimizer, self.batches = kit.model, optimizer, kit.batches
        self._initial = {name: value.detach().clone() for name, value in kit.model.state_dict().items()}

    @abstractmethod
    def compute(self, number: int) -> None:
        """Starts computing the gradient of batch `number` into `p.grad`. Collective on several workers."""

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, number: int) -> None:
        """Starts the step; the device may still work when this returns. Collective on several workers."""
        self.compute(number)
        self.update()

    def batch(self, number: int) -> Batch:
        return self.batches[number % len(self.batches)]

    def excuse(self) -> str | None:
        """Why the side, after some steps, does not train in the way that it is named after; None if it does."""
        return None

    def restart(self) -> None:
        """Resets weights and optimizer to their initial state, in place: captured graphs stay valid."""
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(self._initial[name])
            for value in (value for state in self.states.values() for value in state.values()):
                if isinstance(value, Tensor):
                    value.zero_()

    @property
    def states(self) -> OptimizerStates:
        """What the optimizer keeps on this worker, by parameter."""
        return self.optimizer.state

    @property
    def initial_bytes(self) -> int:
        """What this side holds of the initial weights, for the benchmark alone."""
        return sum(getattr(value, "_local_tensor", value).nbytes for value in self._initial.values())

    def gradients(self) -> dict[str, Tensor]:
        """What stands in `p.grad`, by name. Collective where parameters are sharded."""
        named = ((name, parameter.grad) for name, parameter in self.model.named_parameters())
        return {name: _whole(gradient.clone()) for name, gradient in named if gradient is not None}

    def gradient_means(self) -> dict[str, Tensor]:
        """AdamW's running mean of the gradients, by name: the last ones count most. Collective where it is divided."""
        return {name: _whole(self.states[value]["exp_avg"]) for name, value in self.model.named_parameters()}

    def movement(self) -> dict[str, Tensor]:
        """How far each parameter is from its initial value, by name. Collective where parameters are sharded."""
        named = self.model.named_parameters()
        return {name: _whole(value.detach() - self._initial[name]) for name, value in named}


def _whole(tensor: Any) -> Tensor:
    """A DTensor, as FSDP2's are, is gathered."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


class LoopSide(TrainingSide):
    """The usual loop; `before` is called at the beginning of every step."""

    def __init__(
        self, kit: TrainingKit, forward: Forward, optimizer: Optimizer, before: Callable[[], None] | None = None
    ) -> None:
        super().__init__(kit, optimizer)
        self._forward, self._before = forward, before

    def compute(self, number: int) -> None:
        if self._before is not None:
            self._before()
        self._forward(self.batch(number)).backward()


class LockstepSide(TrainingSide):
    """What the README shows; `captured`: with the lane and the update as CUDA graphs; `compiled`: by torch.compile."""

    def __init__(self, kit: TrainingKit, run: Any, captured: bool = False, compiled: bool = False) -> None:
        optimizer = AdamW(kit.model.parameters(), fused=True, capturable=captured)
        run.replicate(kit.model, optimizer)
        super().__init__(kit, optimizer)
        self._run, self._captured, forward = run, captured, kit.forward(kit.model)
        if compiled:
            forward = torch.compile(forward)

        def lane(*batch: Tensor) -> Tensor:
            loss = forward((batch[0], batch[1]))
            loss.backward()
            return loss

        self._lane: Any = run.captured(lane, optimizer=optimizer) if captured else lane

    def excuse(self) -> str | None:
        if self._captured and not self._lane.num_graphs:
            return "run.captured has recorded no graph of this lane, and has said why"
        return None

    def compute(self, number: int) -> None:
        for lane_batch in self._run.lanes(self.batch(number)):
            self._lane(*lane_batch)


def plain_side(kit: TrainingKit) -> LoopSide:
    """The loop without any data parallelism, on the whole batch."""
    return LoopSide(kit, kit.forward(kit.model), AdamW(kit.model.parameters(), fused=True))


def ddp_side(
    kit: TrainingKit, rank: int, size: int, group: ProcessGroup | None = None, *, compiled: bool = False
) -> LoopSide:
    """DistributedDataParallel at its best: bucket views, a static graph, shares cut before. Collective."""
    forward = ddp_forward(kit, group, compiled=compiled)
    return LoopSide(kit.cut(rank, size), forward, AdamW(kit.model.parameters(), fused=True))


def ddp_forward(kit: TrainingKit, group: ProcessGroup | None = None, *, compiled: bool = False) -> Forward:
    """The loss of a share of a batch by the kit's model inside of DDP. Collective.

    torch compiles no static graph. What is compiled is the model inside of DDP, which torch cuts at DDP's buckets.
    """
    device = next(kit.model.parameters()).device
    ids = [device] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(
        kit.model, device_ids=ids, process_group=group, gradient_as_bucket_view=True, static_graph=not compiled
    )
    return torch.compile(kit.forward(wrapped)) if compiled else kit.forward(wrapped)


def end_process() -> NoReturn:
    """Ends a worker without Python's shutdown, which can deadlock with torch's threads of a process group."""
    sys.stdout.flush()
    os._exit(0)


# -- evidence: times of a wrong result mean nothing ---------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """What a side computed, by parameter: its gradients, and how far it went from the initial weights."""

    gradients: Named
    movement: Named


def distance(actual: Named, expected: Named, of_zeros: float = math.inf) -> tuple[float, float]:
    """‖actual − expected‖ / ‖expected‖ and ‖actual‖ / ‖expected‖ over all parameters, added up in float64.

    Infinite where a parameter is missing or a number not finite. `of_zeros` is the first where there are only zeros.
    """
    if actual.keys() != expected.keys():
        return math.inf, math.inf
    apart = own = other = 0.0
    for name, value in actual.items():
        mine, theirs = value.double(), expected[name].to(value.device).double()
        apart += float((mine - theirs).square().sum())
        own += float(mine.square().sum())
        other += float(theirs.square().sum())
    if not math.isfinite(apart + own + other) or not other:
        return (math.inf if apart else of_zeros), math.inf
    return math.sqrt(apart / other), math.sqrt(own / other)
