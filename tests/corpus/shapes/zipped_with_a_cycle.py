"""A batch of unlabelled data beside each batch, by zip and itertools.cycle of a shorter loader."""

import itertools

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader, unlabelled = run.shard(plain_loader()), run.shard(plain_loader(batch_size=24))

for epoch in run.epochs(EPOCHS):
    for batch, others in zip(loader, itertools.cycle(unlabelled)):
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        for x, _ in run.lanes(others):
            (0.1 * model(x).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
