"""A progress bar around the loader, which holds on to its iterator as tqdm does."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)


class Bar:
    def __init__(self, iterable):
        self.iterable, self.n = iterable, 0

    def __len__(self):
        return len(self.iterable)

    def __iter__(self):
        for item in self.iterable:
            yield item
            self.n += 1


model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

for epoch in run.epochs(EPOCHS):
    bar = Bar(loader)
    for batch in bar:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
