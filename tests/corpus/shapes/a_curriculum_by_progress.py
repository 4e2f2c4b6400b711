"""A sampler whose difficulty is raised by the loop itself, as training goes on."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)


class Curriculum(torch.utils.data.Sampler):
    def __init__(self):
        self.reach = 40

    def __len__(self):
        return self.reach

    def __iter__(self):
        return iter(torch.randperm(self.reach).tolist())


model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
sampler = Curriculum()
loader = run.shard(plain_loader(shuffle=False, sampler=sampler))
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            run.backward(loss_of(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
    sampler.reach = min(90, sampler.reach + 20)
