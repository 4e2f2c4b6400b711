"""A validation loop that is left by break, in the middle of the training loop too."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

validation = run.shard(plain_loader(batch_size=8))
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    right = 0
    with torch.no_grad():
        for number, batch in enumerate(validation):
            if number == 3:
                break
            for x, y in run.lanes(batch):
                right += int((model(x).argmax(1) == y).sum())
    model.train()
    run.print("extra", epoch, run.total(right))
