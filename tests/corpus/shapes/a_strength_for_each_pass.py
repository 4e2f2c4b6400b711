"""A strength is drawn for each pass over the data, in a loop by steps."""

import random

import lockstep
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
while run.step < 22:
    strength = random.random()
    for batch in loader:
        for x, y in run.lanes(batch):
            (strength * loss_of(model, x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
