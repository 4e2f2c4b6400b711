"""A loss over all lanes after every epoch, by run.total of a list."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

validation = run.shard(plain_loader(batch_size=23, shuffle=False))
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    losses = []
    with torch.no_grad():
        for batch in validation:
            for x, y in run.lanes(batch):
                losses.append(float(loss_of(model, x, y)) * 1e6 + 1 / len(x))
    model.train()
    run.print("extra", epoch, run.total(losses))
