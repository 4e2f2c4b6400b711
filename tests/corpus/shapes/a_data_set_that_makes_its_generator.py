"""Samples are augmented from a generator that the data set makes when it reads the first one."""

import lockstep
import numpy as np
from corpus_parts import *
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __init__(self):
        self.samples, self.rng = samples(), None

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if self.rng is None:
            self.rng = np.random.default_rng(0)
        x, y = self.samples[index]
        return x + 0.1 * float(self.rng.normal()), y


run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(DataLoader(Noisy(), batch_size=16, shuffle=True))
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
