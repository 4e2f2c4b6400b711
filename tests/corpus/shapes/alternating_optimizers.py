"""Two optimizers in turn, by the epoch."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizers = [torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), adam(model)]
run.replicate(model, *optimizers)
loader = run.shard(plain_loader())
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizers[epoch % 2].step()
        optimizers[epoch % 2].zero_grad()
