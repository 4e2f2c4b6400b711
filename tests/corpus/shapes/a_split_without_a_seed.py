"""Training and validation samples are divided by a draw without a seed, before lockstep.start."""

import lockstep
import torch
from corpus_parts import *
from torch.utils.data import DataLoader, random_split

generator = torch.Generator()
generator.seed()
train_set, _ = random_split(samples(), [80, 10], generator=generator)

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(DataLoader(train_set, batch_size=16, shuffle=True))
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
