"""The ways to train that are measured against each other on a GPU, each alone in its process.

# Note [The same for all on a GPU]
# Every side starts from the same weights, drawn on the CPU, and trains on the same batches, which are on the GPU
# already, with AdamW at its defaults and gradients set to None. The loss carries its own autocast. Sides that need
# not be deterministic let cuDNN look for its fastest convolutions, as their users would.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lockstep.programs.models import Batch, Workload

Forward = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Kit:
    """What every side is given: the model and the global batches, on the device."""

    workload: Workload
    model: nn.Module
    batches: Sequence[Batch]

    def forward(self, model: Callable[..., Any]) -> Forward:
        """The loss of a batch by `model`, which is the kit's own or wraps it."""
        loss = self.workload.loss
        return lambda batch: loss(model, batch)  # type: ignore[arg-type]


class Side(ABC):
    """One way to train; `step(number)` is the whole update with batch `number`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._initial = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @abstractmethod
    def step(self, number: int) -> None:
        """Returns once the work is on its way, not when it is done. Collective on several workers."""

    def excuse(self) -> str | None:
        """Why the side, after some steps, does not train in the way that it is named after; None if it does."""
        return None

    def restart(self) -> None:
        """The weights are the initial ones, the optimizer has seen nothing. In place: captured graphs stay true."""
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(self._initial[name])
            for state in self.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.zero_()

    def movement(self) -> dict[str, Tensor]:
        """How far each parameter is from its initial value, by name."""
        return {name: value.detach() - self._initial[name] for name, value in self.model.named_parameters()}

    def mean_gradients(self) -> dict[str, Tensor]:
        """The mean of the gradients that AdamW keeps, by parameter: the last ones count most."""
        return {name: self.optimizer.state[value]["exp_avg"] for name, value in self.model.named_parameters()}


class Loop(Side):
    """The usual loop."""

    def __init__(self, kit: Kit, forward: Forward, optimizer: Optimizer, before: Callable[[], None] | None) -> None:
        super().__init__(kit.model, optimizer)
        self._forward, self._batches, self._before = forward, kit.batches, before

    def step(self, number: int) -> None:
        if self._before is not None:
            self._before()
        self._forward(self._batches[number % len(self._batches)]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Lockstep(Side):
    """What the README shows; if `captured`, with the lane and the update as CUDA graphs."""

    def __init__(self, kit: Kit, run: Any, captured: bool) -> None:
        optimizer = AdamW(kit.model.parameters(), fused=True, capturable=captured)
        run.replicate(kit.model, optimizer)
        super().__init__(kit.model, optimizer)
        self._run, self._batches = run, kit.batches
        forward = kit.forward(kit.model)

        def lane(*batch: Tensor) -> Tensor:
            loss = forward((batch[0], batch[1]))
            loss.backward()
            return loss

        self._captured = captured
        self._lane: Any = run.captured(lane, optimizer=optimizer) if captured else lane

    def excuse(self) -> str | None:
        if self._captured and not self._lane.num_graphs:
            return "run.captured has recorded no graph of this lane, and has said why"
        return None

    def step(self, number: int) -> None:
        for lane_batch in self._run.lanes(self._batches[number % len(self._batches)]):
            self._lane(*lane_batch)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
