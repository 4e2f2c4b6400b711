"""A sampler with a generator of its own, which goes on from epoch to epoch."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
import random


class Shuffled(torch.utils.data.Sampler):
    def __init__(self, size):
        self.size, self.chance = size, random.Random(7)

    def __len__(self):
        return self.size

    def __iter__(self):
        order = list(range(self.size))
        self.chance.shuffle(order)
        return iter(order)


model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader(shuffle=False, sampler=Shuffled(90)))
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
