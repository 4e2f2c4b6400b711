"""The rate of each epoch is the next of a list's iterator, which is only asked for it; another one is only printed."""

import itertools

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

rates, names = iter([0.01, 0.02, 0.005, 0.001]), itertools.cycle("abcdefg")
for epoch in run.epochs(EPOCHS):
    for group in optimizer.param_groups:
        group["lr"] = next(rates)
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.print(next(names))
