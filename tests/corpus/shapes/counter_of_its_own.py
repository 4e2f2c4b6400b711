"""Steps are counted by hand, and the rate follows the count."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

steps = 0
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + steps)
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
