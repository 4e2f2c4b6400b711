"""A strategy of a user's own: the steps of `Replicated`, and a count and a mean of all updates beside them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.events import Events
from lockstep.strategies import EngineOptions, Replicas, StepEngine
from lockstep.strategies.replicated import ReplicatedEngine
from lockstep.wire.generation import Generation

MEAN = "own/mean"


@dataclass(frozen=True)
class Counting:
    """Made by hand, so that no name of lockstep's own is in use."""

    def __str__(self) -> str:
        return "counting"

    def engine(self, options: EngineOptions, generation: Generation, events: Events) -> StepEngine:
        return CountingEngine(options, generation, events)


class CountingEngine(ReplicatedEngine):
    """`calls` are those of its hooks that a run makes outside of steps, in order."""

    def __init__(self, options: EngineOptions, generation: Generation, events: Events) -> None:
        self.calls: list[str] = []
        self.held: list[str] = []
        self.num_updates, self.mean = 0, torch.zeros(3)
        super().__init__(options, generation, events)

    def hold(self, replicas: Replicas, generation: Generation) -> None:
        self.calls.append("hold")
        self.held = [named.name for named in replicas.parameters]
        super().hold(replicas, generation)

    def hand_over(self) -> float | None:
        self.calls.append("hand_over")
        return super().hand_over()

    def before_update(self, optimizer: Optimizer, has_closure: bool) -> None:
        self.calls.append(f"before {type(optimizer).__name__}")

    def after_update(self, optimizer: Optimizer) -> None:
        self.calls.append(f"after {type(optimizer).__name__}")
        self.num_updates += 1
        self.mean = self.mean + (self.num_updates - self.mean) / self.num_updates

    def state(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        tensors[MEAN] = self.mean
        return {"num_updates": self.num_updates}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.calls.append("load")
        self.num_updates, self.mean = state["num_updates"], tensors[MEAN].clone()
