"""An evaluation every few steps, inside of the training loop."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

validation = run.shard(plain_loader(batch_size=20, shuffle=False))
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.step % 4 == 0:
            model.eval()
            with torch.no_grad():
                losses = [float(loss_of(model, x, y)) for held in validation for x, y in run.lanes(held)]
            model.train()
            run.print("extra", run.step, run.total(losses))
