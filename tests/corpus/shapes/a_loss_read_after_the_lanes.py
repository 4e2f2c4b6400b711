"""What the last lane has left is read after the loop over lanes, in every step and after the training."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

for epoch in run.epochs(EPOCHS):
    losses = []
    for batch in loader:
        for x, y in run.lanes(batch):
            loss = loss_of(model, x, y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(epoch, sum(losses) / len(losses))
assert torch.isfinite(loss)
