"""Each epoch goes over one loader, then over another, then over the first again."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
clean, noisy = run.shard(plain_loader()), run.shard(plain_loader(batch_size=45))


def train(loader):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


for epoch in run.epochs(2):
    train(clean)
    train(noisy)
    train(clean)
