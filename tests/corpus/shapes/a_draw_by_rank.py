"""One random number is drawn on rank 0 alone, and then one on all workers."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

for epoch in run.epochs(EPOCHS):
    for batch in loader:
        if run.rank == 0:
            torch.rand(1)
        scale = 1 + torch.rand(1)
        for x, y in run.lanes(batch):
            (scale * loss_of(model, x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
