"""A trainer with callbacks and a step counter of its own, which decides on updates."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)


class Trainer:
    def __init__(self, model, optimizer, callbacks):
        self.model, self.optimizer, self.callbacks, self.global_step = model, optimizer, callbacks, 0

    def fit(self, loader, epochs):
        for epoch in run.epochs(epochs):
            for batch in loader:
                self.training_step(batch)
                for callback in self.callbacks:
                    callback(self)

    def training_step(self, batch):
        for x, y in run.lanes(batch):
            loss_of(self.model, x, y).backward()
        self.global_step += 1
        if self.global_step % 3 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

Trainer(model, optimizer, [lambda trainer: None]).fit(loader, EPOCHS)
