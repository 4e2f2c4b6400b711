"""A gradient penalty with create_graph."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            x.requires_grad_(True)
            loss = loss_of(model, x, y)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
