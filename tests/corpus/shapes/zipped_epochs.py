"""Each epoch has a weight of its own, by zip of run.epochs and a list."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

for epoch, weight in zip(run.epochs(EPOCHS), [1.0, 2.0, 0.5, 0.1]):
    for batch in loader:
        for x, y in run.lanes(batch):
            (weight * loss_of(model, x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
