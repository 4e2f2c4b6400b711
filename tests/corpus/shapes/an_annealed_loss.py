"""A loss of the script's own has a factor that grows after each update; the run is not given it."""

import lockstep
from corpus_parts import *
from torch import nn


class Penalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor, self.last = 0.0, 0.0

    def forward(self, model, x, y):
        loss = loss_of(model, x, y)
        self.last = loss.item()
        return loss + self.factor * model(x).square().mean()


run = lockstep.start(lanes=6, seed=1)
model = network()
criterion = Penalised()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            criterion(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        criterion.factor = min(1.0, criterion.factor + 0.01)
