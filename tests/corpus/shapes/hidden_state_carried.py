"""Truncated back-propagation through time: the hidden state of a lane is in run.carried."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
torch.manual_seed(2)
model = nn.GRUCell(6, 5)
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader(shuffle=False, drop_last=True))
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            hidden = run.carried.get("hidden", torch.zeros(len(x), 5))
            hidden = model(x, hidden)
            run.carried["hidden"] = hidden.detach()
            hidden.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
