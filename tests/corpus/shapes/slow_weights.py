"""As Lookahead does: an object of the script wraps the optimizer, and keeps slow weights and a count."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)


class Lookahead:
    def __init__(self, optimizer, k=5, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.optimizer.param_groups, self.slow):
                for p, s in zip(group["params"], slow):
                    s.data.add_(p.data - s.data, alpha=self.alpha)
                    p.data.copy_(s.data)


model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
la = Lookahead(optimizer)
loader = run.shard(plain_loader())
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        la.step()
        la.zero_grad()
