"""Averaged weights are put into the model for each evaluation, and the trained ones back afterwards."""

import lockstep
import torch
from corpus_parts import *
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
run.replicate(model, optimizer, average=average)
loader, validation = run.shard(plain_loader()), run.shard(plain_loader(batch_size=23, shuffle=False))

for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter, averaged in zip(model.parameters(), average.module.parameters(), strict=True):
        parameter.data.copy_(averaged.data)
    with torch.no_grad():
        losses = [float(loss_of(model, x, y)) for held in validation for x, y in run.lanes(held)]
    run.print("extra", epoch, run.total(losses))
    for parameter, kept in zip(model.parameters(), trained, strict=True):
        parameter.data.copy_(kept)
