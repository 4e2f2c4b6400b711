"""for step in range(n): the loop begins at 0, whatever was done before."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

batches = iter(loader)
for step in range(22):
    batch = next(batches, None)
    if batch is None:
        batches = iter(loader)
        batch = next(batches)
    for x, y in run.lanes(batch):
        loss_of(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
