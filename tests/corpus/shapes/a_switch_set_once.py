"""A switch of the model, and a number in its settings, are changed once, in the first epoch."""

from types import SimpleNamespace

import lockstep
from corpus_parts import *
from torch import nn


class Switched(nn.Module):
    def __init__(self):
        super().__init__()
        self.network, self.is_mirrored, self.kind = network(), False, "plain"
        self.settings = SimpleNamespace(temperature=2.0)

    def forward(self, x):
        scale = 0.5 if self.kind == "halved" else 1.0
        return scale * self.network(-x if self.is_mirrored else x) / self.settings.temperature


run = lockstep.start(lanes=6, seed=1)
model = Switched()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
for epoch in run.epochs(EPOCHS):
    if epoch == 0:
        model.is_mirrored = True
        model.kind = "halved"
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.settings.temperature *= 0.95
