"""A strength is drawn before each batch is asked for, by next."""

import random

import lockstep
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

batches = None
while run.step < 22:
    if batches is None:
        batches = iter(loader)
    strength = random.random()
    batch = next(batches, None)
    if batch is None:
        batches = None
        continue
    for x, y in run.lanes(batch):
        (strength * loss_of(model, x, y)).backward()
    optimizer.step()
    optimizer.zero_grad()
