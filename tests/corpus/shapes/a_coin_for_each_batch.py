"""A coin decides for each batch whether it is mixed with itself; `random` throws it, outside of lanes."""

import random

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
        is_mixed = random.random() < 0.5
        side = random.randrange(2)
        for x, y in run.lanes(batch):
            if is_mixed:
                x = torch.cat([x.flip(0), x])[side * len(x) :][: len(x)]
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
