"""One batch of an endless validation iterator every few steps."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

validation = run.shard(plain_loader(batch_size=4))
held = iter(validation)
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.step % 3 == 0:
            model.eval()
            with torch.no_grad():
                losses = [float(loss_of(model, x, y)) for x, y in run.lanes(next(held))]
            model.train()
            run.print("extra", run.step, run.total(losses))
