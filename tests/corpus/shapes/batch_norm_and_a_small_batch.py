"""BatchNorm, and a last batch of which some lanes would have one sample."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(DataLoader(samples(83), batch_size=16, shuffle=True))
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
