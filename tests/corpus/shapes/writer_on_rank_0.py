"""A writer on rank 0 alone, and a file at the end."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
from pathlib import Path


class Writer:
    def __init__(self):
        self.file = open("curve.txt", "a")

    def add_scalar(self, *values):
        print(*values, file=self.file, flush=True)


writer = Writer() if run.rank == 0 else None
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            run.backward(loss_of(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
        if run.rank == 0:
            writer.add_scalar("loss", run.loss, run.step)
if run.rank == 0:
    torch.save(model.state_dict(), "final.pt")
