"""A script that trains with every optimizer that can be flat, flat and not, and prints both digests as JSON.

With the name of an optimizer it trains once, flat, with that one.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import lockstep

STEPS = 5


class Net(nn.Module):
    """Weights that can be flat, one in channels_last, biases that cannot, and a layer that one step does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(36, 5)
        self.sometimes = nn.Linear(36, 36)
        self.conv = nn.Conv2d(3, 36, 3).to(memory_format=torch.channels_last)
        self.large = nn.Linear(36, 4099)
        self.back = nn.Linear(4099, 36)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        h = torch.tanh(self.conv(x)).mean((2, 3))
        h = h + self.back(torch.tanh(self.large(h)))
        return self.out(h if step == 3 else h + self.sometimes(h))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": decayed}, {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: SGD(m.parameters(), 0.1, fused=True),
    "momentum": lambda m: SGD(groups(m), 0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "nesterov": lambda m: SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True, dampening=0, fused=True),
    "adam": lambda m: Adam(m.parameters(), torch.tensor(0.01), weight_decay=0.1, fused=True),
    "adamw": lambda m: AdamW(groups(m), 0.01, weight_decay=0.1, fused=True),
    "amsgrad": lambda m: AdamW(m.parameters(), 0.01, amsgrad=True, capturable=True, fused=True),
}
DTYPES = {"float32": (torch.float32, None), "bfloat16": (torch.bfloat16, None), "mixed": (torch.bfloat16, "float32")}


def digest_of(kind: str, dtype: torch.dtype, reduce_dtype: str | None, flat: bool) -> str:
    with lockstep.start(lanes=3, seed=3, flat=flat, reduce_dtype=reduce_dtype) as run:
        torch.manual_seed(4)
        model = Net().to(run.device, dtype)
        optimizer = OPTIMIZERS[kind](model)
        run.replicate(model, optimizer)
        x, y = torch.randn(STEPS, 13, 3, 5, 5), torch.randint(0, 5, (STEPS, 13))
        for step in range(STEPS):
            for images, labels in run.lanes((x[step], y[step])):
                F.cross_entropy(model(images.to(dtype), step).float(), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if run.rank == 0 and flat:
            moved = {p.untyped_storage().data_ptr() for p in model.parameters()}
            assert len(moved) < len(list(model.parameters())), "nothing was flat"
        return run.digest()


def main() -> None:
    if sys.argv[1:]:
        print(json.dumps(digest_of(sys.argv[1], *DTYPES["mixed"], flat=True)))
        return
    found = {
        f"{kind} {name}": [digest_of(kind, *dtypes, flat) for flat in (True, False)]
        for kind in OPTIMIZERS
        for name, dtypes in DTYPES.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
