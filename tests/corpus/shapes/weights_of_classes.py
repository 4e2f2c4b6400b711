"""Weights of the classes, in a NumPy array, which change after each epoch."""

import lockstep
import numpy as np
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
weights = np.ones(3)
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            w = torch.tensor(weights, dtype=torch.float32)
            (w[y].mean() * loss_of(model, x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = 0.5 * weights + 0.1 * epoch
