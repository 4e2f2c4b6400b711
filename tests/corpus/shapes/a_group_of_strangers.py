"""optimizer.add_param_group later, with a tensor that is in no model."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

for epoch in run.epochs(EPOCHS):
    if epoch == 1:
        extra = torch.zeros(3, requires_grad=True)
        optimizer.add_param_group({"params": [extra]})
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
