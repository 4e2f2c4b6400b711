"""Training ends when the validation loss has not fallen for a while; the count is a variable."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

validation = run.shard(plain_loader(shuffle=False))
best, waited = float("inf"), 0
for epoch in run.epochs(8):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses = [float(loss_of(model, x, y)) for batch in validation for x, y in run.lanes(batch)]
    model.train()
    if run.total(losses) < 0.97 * best:
        best, waited = run.total(losses), 0
    else:
        waited += 1
    if waited == 2:
        break
