"""A loader with processes, and augmentation in the data set."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 90

    def __getitem__(self, index):
        x, y = samples()[index]
        return x + 0.1 * torch.randn(6), y


model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(DataLoader(Noisy(), batch_size=16, shuffle=True, num_workers=1))
for epoch in run.epochs(2):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
