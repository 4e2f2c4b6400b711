"""An exponential moving average of the weights, tracked."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)


class Average:
    def __init__(self, model):
        self.model, self.mean = model, {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self):
        for name, parameter in self.model.named_parameters():
            self.mean[name].lerp_(parameter, 0.1)

    def state_dict(self):
        return dict(self.mean)

    def load_state_dict(self, state):
        self.mean = {name: mean.clone() for name, mean in state.items()}


model = network()
optimizer = adam(model)
average = Average(model)
run.replicate(model, optimizer, average=average)
loader = run.shard(plain_loader())
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
run.print("extra", [float(mean.double().sum()) for mean in average.mean.values()])
