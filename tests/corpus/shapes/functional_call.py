"""torch.func.functional_call on the model's own parameters."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
from torch.func import functional_call

model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            scores = functional_call(model, dict(model.named_parameters()), (x,))
            F.cross_entropy(scores, y).backward()
        optimizer.step()
        optimizer.zero_grad()
