"""The list that a data set reads is shuffled in place at the head of each epoch."""

import random

import lockstep
from corpus_parts import *
from torch.utils.data import Dataset


class Listed(Dataset):
    def __init__(self, samples):
        self.samples, self.order = samples, list(range(len(samples)))

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        return self.samples[self.order[index]]


run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
listed = Listed(plain_loader().dataset)
loader = run.shard(DataLoader(listed, batch_size=16))
for epoch in run.epochs(EPOCHS):
    random.shuffle(listed.order)
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
