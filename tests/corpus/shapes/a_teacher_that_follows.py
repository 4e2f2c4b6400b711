"""A copy of the model follows it, and the loss compares both (a mean teacher)."""

import copy

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
teacher = copy.deepcopy(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            with torch.no_grad():
                taught = teacher(x)
            (loss_of(model, x, y) + 0.1 * (model(x) - taught).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters()):
                slow.mul_(0.9).add_(fast, alpha=0.1)
