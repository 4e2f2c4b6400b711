"""The data set gets another transform once, in the first epoch."""

import lockstep
from corpus_parts import *
from torch.utils.data import DataLoader, Dataset


class Transformed(Dataset):
    def __init__(self):
        self.samples, self.transform = samples(), None

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        x, y = self.samples[index]
        return x if self.transform is None else self.transform(x), y


def flipped(x):
    return x.flip(0)


run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
train_set = Transformed()
loader = run.shard(DataLoader(train_set, batch_size=16, shuffle=True))
for epoch in run.epochs(EPOCHS):
    if epoch == 0:
        train_set.transform = flipped
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
