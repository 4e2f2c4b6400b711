"""How strongly samples are changed is a global number that the data set reads; it is set once, in the first epoch."""

import lockstep
from corpus_parts import *
from torch.utils.data import DataLoader, Dataset

strength = 1.0


class Scaled(Dataset):
    def __init__(self):
        self.samples = samples()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        x, y = self.samples[index]
        return strength * x, y


run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(DataLoader(Scaled(), batch_size=16, shuffle=True))
for epoch in run.epochs(EPOCHS):
    if epoch == 0:
        strength = 2.0
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
