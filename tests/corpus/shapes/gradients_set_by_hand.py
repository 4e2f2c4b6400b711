"""p.grad from torch.autograd.grad, two of them in one memory."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = nn.ModuleList([nn.Linear(6, 3, bias=False), nn.Linear(6, 3, bias=False)])
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss = F.cross_entropy(model[0](x) + model[1](x), y)
            (gradient,) = torch.autograd.grad(loss, [model[0].weight])
            model[0].weight.grad = model[1].weight.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
