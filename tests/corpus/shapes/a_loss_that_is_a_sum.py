"""A loss that is a sum over the samples, and says so."""

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
        for x, y in run.lanes(batch):
            run.backward(F.cross_entropy(model(x), y, reduction="sum"), reduction="sum")
        optimizer.step()
        optimizer.zero_grad()
