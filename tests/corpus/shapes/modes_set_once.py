"""A layer is frozen, and BatchNorm put into evaluation mode, once, in the first epoch."""

import lockstep
import torch
from corpus_parts import *
from torch import nn

run = lockstep.start(lanes=6, seed=1)
torch.manual_seed(11)
model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
for epoch in run.epochs(EPOCHS):
    if epoch == 0:
        model[3].bias.requires_grad_(False)
    for number, batch in enumerate(loader):
        if epoch == 0 and number == 3:
            model[1].eval()
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
