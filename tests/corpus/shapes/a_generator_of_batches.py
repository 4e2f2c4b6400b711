"""Batches come through a generator function, augmented on their way by lanes."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())


def batches():
    for batch in loader:
        yield batch


for epoch in run.epochs(EPOCHS):
    for batch in batches():
        for x, y in run.lanes(batch):
            loss_of(model, x + 0.1 * torch.randn_like(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
