"""Labelled and unlabelled data side by side: zip of two loaders."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

unlabelled = run.shard(plain_loader(batch_size=12))
for epoch in run.epochs(EPOCHS):
    for batch, other in zip(loader, unlabelled):
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        for x, _ in run.lanes(other):
            (0.1 * model(x).softmax(1).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
