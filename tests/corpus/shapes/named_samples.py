"""Batches are dictionaries with the names of their samples; one function trains, and evaluates, with a weight by the epoch."""

import lockstep
import torch
from corpus_parts import *
from torch.utils.data import DataLoader, Dataset


class Named(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        x, y = self.data[i]
        return {"name": f"sample {i}", "x": x, "y": y}


run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(DataLoader(Named(samples()), batch_size=16, shuffle=True))
validation = run.shard(DataLoader(Named(samples(40)), batch_size=16))


def train_and_evaluate():
    for epoch in run.epochs(EPOCHS):
        weight = 1 / (1 + epoch)
        for batch in loader:
            for part in run.lanes(batch):
                names, x, y = part["name"], part["x"], part["y"]
                known = 1.0 if names[0].startswith("sample") else 0.5
                (weight * known * loss_of(model, x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for batch in validation:
                for part in run.lanes(batch):
                    names, x, y = part["name"], part["x"], part["y"]
                    known = loss_of(model, x, y).item()
        model.train()


train_and_evaluate()
