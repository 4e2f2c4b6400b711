"""An optimizer that keeps float32 copies of bfloat16 parameters."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)


class Masters(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master", p.detach().float().clone())
                master.sub_(group["lr"] * p.grad.float())
                p.copy_(master)


model = network(dropout=0.0).bfloat16()
optimizer = Masters(model.parameters(), 0.05)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x.bfloat16(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
