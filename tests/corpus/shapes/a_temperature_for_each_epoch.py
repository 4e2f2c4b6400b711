"""A temperature that falls with each update is an attribute of the model, and begins anew with each epoch."""

import lockstep
from corpus_parts import *
from torch import nn


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.network, self.temperature = network(), 2.0

    def forward(self, x):
        return self.network(x) / self.temperature


run = lockstep.start(lanes=6, seed=1)
model = Tempered()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
for epoch in run.epochs(EPOCHS):
    model.temperature = 2.0
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.temperature *= 0.95
