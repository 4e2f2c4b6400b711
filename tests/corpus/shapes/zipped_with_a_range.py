"""So many batches an epoch by zip(range(n), loader)."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

for epoch in run.epochs(EPOCHS):
    for _, batch in zip(range(4), loader):
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
