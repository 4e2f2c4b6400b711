"""Every epoch seeds the generators by its number; masks and strengths are drawn from them outside of lanes."""

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
    torch.manual_seed(epoch)
    random.seed(epoch)
    for batch in loader:
        mask = (torch.rand(6) > 0.2).float()
        strength = random.uniform(0.5, 1.5)
        for x, y in run.lanes(batch):
            (strength * loss_of(model, x * mask, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
