"""A strength is drawn at the head of each epoch, and a mask for each batch."""

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
    strength = random.uniform(0.5, 1.5)
    for batch in loader:
        mask = (torch.rand(6) > 0.2).float()
        side = random.choice([1.0, 2.0])
        for x, y in run.lanes(batch):
            (strength * side * loss_of(model, x * mask, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
