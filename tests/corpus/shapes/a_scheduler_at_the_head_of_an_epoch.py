"""A scheduler steps at the head of each epoch, and changes the rate after four of them."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.1)
run.replicate(model, optimizer, scheduler=scheduler)
loader = run.shard(plain_loader())

for _ in run.epochs(EPOCHS):
    scheduler.step()
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
