"""An optimizer of the script's own counts its updates in an attribute, which its state_dict does not have."""

import lockstep
import torch
from corpus_parts import *


class Decaying(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.updates = 0

    @torch.no_grad()
    def step(self):
        self.updates += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.mul_(0.9).add_(parameter.grad)
                parameter.add_(mean, alpha=-group["lr"] / (1 + 0.1 * self.updates))


run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = Decaying(model.parameters(), 0.05)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
run.print("extra", optimizer.updates)
