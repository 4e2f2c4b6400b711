"""A schedule is a function that counts its calls in a variable around it."""

import lockstep
import torch
from corpus_parts import *


def make_schedule():
    calls = 0

    def rate():
        nonlocal calls
        calls += 1
        return 0.01 / calls

    return rate


run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

rate = make_schedule()
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for group in optimizer.param_groups:
            group["lr"] = rate()
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
