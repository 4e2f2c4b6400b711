"""An attribute that the script hangs on torch's optimizer shrinks with each batch, and dropout is computed from it."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
optimizer.warmth = 1.0
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

for epoch in run.epochs(EPOCHS):
    for batch in loader:
        optimizer.warmth *= 0.9
        model[2].p = 0.2 * optimizer.warmth
        for x, y in run.lanes(batch):
            run.backward(loss_of(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
