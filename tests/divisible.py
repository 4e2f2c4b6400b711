"""Optimizers whose update can be divided, and a model whose tensors are cut: on CPUs and on a GPU."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import lockstep

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, dampening=0.1, weight_decay=1e-3),
    "SGD fused": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, fused=True),
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "LARS": lambda p: lockstep.optim.LARS(p, 1e-2),
    "LAMB": lambda p: lockstep.optim.LAMB(p, 1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


class Wide(nn.Module):
    """Tensors that are cut, with a rest that fills no vector; and some in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 70, 3, padding=1).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(70, 97), nn.Linear(97, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.conv(x.view(-1, 3, 2, 2))).mean((2, 3))
        out: torch.Tensor = self.second(torch.tanh(self.first(h))) * self.scale
        return out
