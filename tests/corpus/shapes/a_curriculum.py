"""A sampler that gives harder samples in later epochs, which it learns by set_epoch."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)


class Curriculum(torch.utils.data.Sampler):
    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return min(90, 40 + 20 * self.epoch)

    def __iter__(self):
        return iter(torch.randperm(len(self)).tolist())


model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader(shuffle=False, sampler=Curriculum()))
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
