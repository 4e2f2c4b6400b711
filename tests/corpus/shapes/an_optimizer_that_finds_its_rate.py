"""An optimizer whose groups have `lr=None`: it finds its rate itself, by the size of the gradient, like Adafactor."""

import lockstep
import torch
from corpus_parts import *


class Finding(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": None})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                size = parameter.grad.norm().item() + 1e-8
                parameter.data.add_(parameter.grad, alpha=-0.05 / (size * state["step"] ** 0.5))


run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = Finding(model.parameters())
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            run.backward(loss_of(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
