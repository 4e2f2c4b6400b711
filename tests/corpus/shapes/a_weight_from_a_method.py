"""A trainer counts its steps, and a method of it makes the weight of the loss from the count."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.k = model, optimizer, 0

    def weight(self):
        return 1.0 + 0.1 * self.k

    def loss(self, x, y):
        return self.weight() * loss_of(self.model, x, y)

    def fit(self, loader):
        for epoch in run.epochs(EPOCHS):
            for batch in loader:
                for x, y in run.lanes(batch):
                    self.loss(x, y).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.k += 1


model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
Trainer(model, optimizer).fit(run.shard(plain_loader()))
