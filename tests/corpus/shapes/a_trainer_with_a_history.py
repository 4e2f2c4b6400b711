"""A trainer that holds model, loader and settings, and a history of losses that is only shown."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)


class Trainer:
    def __init__(self, model, optimizer, loader, report):
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.report, self.num_epochs, self.history = report, EPOCHS, []

    def step(self, batch):
        for x, y in run.lanes(batch):
            run.backward(loss_of(self.model, x, y))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.append(run.loss)
        self.report(len(self.history))


def train(trainer):
    for epoch in run.epochs(trainer.num_epochs):
        for batch in trainer.loader:
            trainer.step(batch)


model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
train(Trainer(model, optimizer, run.shard(plain_loader()), lambda number: None))
