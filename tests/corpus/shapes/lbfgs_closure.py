"""LBFGS: several loops over a batch inside of optimizer.step."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network(dropout=0.0)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
for epoch in run.epochs(2):
    for batch in loader:

        def closure():
            optimizer.zero_grad()
            for x, y in run.lanes(batch):
                run.backward(loss_of(model, x, y))
            return run.loss

        optimizer.step(closure)
