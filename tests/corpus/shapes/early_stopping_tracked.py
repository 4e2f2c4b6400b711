"""The same, and the object has a state_dict and is given to run.replicate."""

import lockstep
import torch
from corpus_parts import *


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.waited = patience, None, 0

    def __call__(self, loss):
        if self.best is None or loss < 0.97 * self.best:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def state_dict(self):
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state):
        self.best, self.waited = state["best"], state["waited"]


run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
stopping = EarlyStopping(2)
run.replicate(model, optimizer, stopping=stopping)
loader = run.shard(plain_loader())
validation = run.shard(plain_loader(shuffle=False))

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
    if stopping(run.total(losses)):
        break
