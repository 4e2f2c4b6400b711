"""A generator of the script's own, from which only what is printed is drawn."""

import random

import lockstep
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
chance = random.Random(2)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.print("the weight", chance.choice(model[0].weight[0].tolist()))
