"""An evaluation at the head of each epoch, by which a scheduler sets the rate of the epoch."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
run.replicate(model, optimizer, scheduler=scheduler)
loader, validation = run.shard(plain_loader()), run.shard(plain_loader(batch_size=23, shuffle=False))

for epoch in run.epochs(EPOCHS):
    with torch.no_grad():
        losses = [float(loss_of(model, x, y)) for held in validation for x, y in run.lanes(held)]
    loss = run.total(losses)
    scheduler.step(loss)
    run.print("extra", epoch, loss, scheduler.get_last_lr())
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
