"""The weight of each step comes from a generator function of the script, by next."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())


def falling():
    weight = 2.0
    while True:
        yield weight
        weight *= 0.9


weights = falling()
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        weight = next(weights)
        for x, y in run.lanes(batch):
            (weight * loss_of(model, x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
