"""The rate is halved whenever the loss has risen; the last loss is a variable."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

last = float("inf")
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            run.backward(loss_of(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
        if run.loss > last:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        last = run.loss
