"""Generators are seeded below run.checkpoints, where a resumed run has put them back; masks are drawn from them."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
run.checkpoints("saved")
torch.manual_seed(3)

for epoch in run.epochs(EPOCHS):
    for batch in loader:
        mask = (torch.rand(6) > 0.2).float()
        for x, y in run.lanes(batch):
            loss_of(model, x * mask, y).backward()
        optimizer.step()
        optimizer.zero_grad()
