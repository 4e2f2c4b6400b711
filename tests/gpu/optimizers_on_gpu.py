"""A script that trains a little with each of many optimizers, and prints their digests as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import lockstep

sys.path.append(str(Path(__file__).parents[1]))
import divisible

OPTIMIZERS: dict[str, Any] = {
    **divisible.OPTIMIZERS,
    "AdamW for each": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "AdamW capturable": lambda p: torch.optim.AdamW(p, torch.tensor(1e-2), capturable=True),
}


def digest(name: str, strategy: str) -> str:
    with lockstep.start(lanes=6, seed=1, strategy=strategy, drift_every=2) as run:
        torch.manual_seed(3)
        model = divisible.Wide()
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
