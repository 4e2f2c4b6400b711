"""The data set grows with the epochs: by the epoch, so that everybody can make it."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
for epoch in run.epochs(EPOCHS):
    loader = run.shard(DataLoader(samples(60 + 10 * epoch), batch_size=16, shuffle=True))
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
