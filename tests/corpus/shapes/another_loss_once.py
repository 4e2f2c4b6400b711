"""The loss function is replaced once, in the first epoch."""

import lockstep
from corpus_parts import *
from torch import nn

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
criterion = nn.CrossEntropyLoss()
for epoch in run.epochs(EPOCHS):
    if epoch == 0:
        criterion = nn.CrossEntropyLoss(label_smoothing=0.2)
    for batch in loader:
        for x, y in run.lanes(batch):
            criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
