"""Training ends by an object that remembers the best validation loss; it is not tracked."""

import lockstep
import torch
from corpus_parts import *


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.waited, self.stop = patience, None, 0, False

    def __call__(self, loss):
        if self.best is None or loss < 0.97 * self.best:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
            self.stop = self.waited >= self.patience


run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
validation = run.shard(plain_loader(shuffle=False))
stopping = EarlyStopping(2)

for epoch in run.epochs(8):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses = [float(loss_of(model, x, y)) for batch in validation for x, y in run.lanes(batch)]
    model.train()
    stopping(run.total(losses))
    if stopping.stop:
        break
