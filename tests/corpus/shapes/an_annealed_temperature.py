"""A temperature, and the rate of a dropout layer, are attributes of the model that change after each update."""

import lockstep
from corpus_parts import *
from torch import nn


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.network, self.drop, self.temperature = network(), nn.Dropout(0.2), 2.0

    def forward(self, x):
        return self.network(self.drop(x)) / self.temperature


run = lockstep.start(lanes=6, seed=1)
model = Tempered()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.temperature = max(0.5, 0.95 * model.temperature)
        model.drop.p *= 0.9
run.print("extra", model.temperature, model.drop.p)
