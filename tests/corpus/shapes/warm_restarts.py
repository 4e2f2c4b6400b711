"""Warm restarts by the fraction of an epoch, counted by enumerate."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
run.replicate(model, optimizer, scheduler=scheduler)
loader = run.shard(plain_loader())
for epoch in run.epochs(EPOCHS):
    for i, batch in enumerate(loader):
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(epoch + i / len(loader))
