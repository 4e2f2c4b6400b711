"""A scheduler steps and the last loss is shown between an epoch's batches and its evaluation."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
run.replicate(model, optimizer, scheduler=scheduler)
loader, validation = run.shard(plain_loader()), run.shard(plain_loader(batch_size=23, shuffle=False))

for epoch in run.epochs(EPOCHS):
    model.train()
    for batch in loader:
        for x, y in run.lanes(batch):
            loss = loss_of(model, x, y)
            run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        last = run.loss
    scheduler.step()
    model.eval()
    with torch.no_grad():
        losses = [float(loss_of(model, x, y)) for held in validation for x, y in run.lanes(held)]
    run.print("extra", epoch, last, scheduler.get_last_lr(), run.total(losses))
