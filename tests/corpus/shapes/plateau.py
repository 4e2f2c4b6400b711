"""ReduceLROnPlateau on a validation loss, tracked."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3, threshold=0.2)
run.replicate(model, optimizer, scheduler=scheduler)
loader, validation = run.shard(plain_loader()), run.shard(plain_loader(shuffle=False))
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model, x, y) for batch in validation for x, y in run.lanes(batch)]
    model.train()
    scheduler.step(run.total(losses))
