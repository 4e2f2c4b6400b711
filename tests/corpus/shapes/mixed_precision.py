"""bfloat16 autocast."""

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
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, x, y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
