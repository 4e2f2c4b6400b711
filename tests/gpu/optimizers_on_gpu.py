"""A script that trains a little with each of many optimizers, and prints their digests as JSON."""

import json
import sys

import torch
import torch.nn.functional as F
from torch import nn

import lockstep

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "AdamW for each": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "AdamW capturable": lambda p: torch.optim.AdamW(p, torch.tensor(1e-2), capturable=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
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
    """Tensors that are cut, with a rest that fills no vector; some in channels_last, one a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 70, 3, padding=1).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(70, 97), nn.Linear(97, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.conv(x.view(-1, 3, 2, 2))).mean((2, 3))
        return self.second(torch.tanh(self.first(h))) * self.scale


def digest(name: str, strategy: str) -> str:
    with lockstep.start(lanes=6, seed=1, strategy=strategy, drift_every=2) as run:
        torch.manual_seed(3)
        model = Wide()
        optimizer = OPTIMIZERS[name](model.parameters())
        run.replicate(model, optimizer)
        for step in range(4):
            torch.manual_seed(step)
            for x, y in run.lanes((torch.randn(21, 12), torch.randint(0, 5, (21,)))):
                run.backward(F.cross_entropy(model(x), y))
            run.clip_grad_norm_(1.0)
            optimizer.step()
            with torch.no_grad():
                model.first.weight.clamp_(-0.5, 0.5)
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
        return run.digest()


if __name__ == "__main__":
    print(json.dumps({name: digest(name, sys.argv[1]) for name in OPTIMIZERS}))
