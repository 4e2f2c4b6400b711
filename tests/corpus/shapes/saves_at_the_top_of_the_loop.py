"""run.save at the top of the loop body, before the batch is trained on; resumed by run.resume."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
import os

model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

if os.path.exists("checkpoint"):
    run.resume("checkpoint")
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        if run.step % 3 == 1:
            run.save("checkpoint")
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
