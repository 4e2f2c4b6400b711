"""run.save in the body of the loop, behind `scheduler.step()` and before the batch is trained on."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
run.replicate(model, optimizer, scheduler=scheduler)
loader = run.shard(plain_loader())

for epoch in run.epochs(EPOCHS):
    for batch in loader:
        scheduler.step()
        if run.step % 3 == 1:
            run.save("checkpoint")
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
