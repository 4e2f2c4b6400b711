"""SWA: torch's AveragedModel and its scheduler, tracked."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
from torch.optim.swa_utils import SWALR, AveragedModel

model = network()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
averaged, scheduler = AveragedModel(model), SWALR(optimizer, 0.02, anneal_epochs=2)
run.replicate(model, optimizer, averaged=averaged, scheduler=scheduler)
loader = run.shard(plain_loader())
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    averaged.update_parameters(model)
    scheduler.step()
run.print("extra", [float(p.double().sum()) for p in averaged.parameters()])
