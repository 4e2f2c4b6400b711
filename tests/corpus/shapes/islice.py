"""So many batches an epoch by itertools.islice."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
from itertools import islice

model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

for epoch in run.epochs(EPOCHS):
    for batch in islice(loader, 4):
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
