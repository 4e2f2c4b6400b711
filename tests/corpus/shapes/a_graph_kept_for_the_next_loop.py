"""As DCGAN does: what one loop has computed is used, with its graph, in the next."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
critic, generator = network(dropout=0.0), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
critics, generators = adam(critic), adam(generator)
run.replicate(critic, critics)
run.replicate(generator, generators)
loader = run.shard(plain_loader())
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        fakes = []
        for x, y in run.lanes(batch):
            fakes.append(generator(x))
            loss_of(critic, fakes[-1].detach(), y).backward()
        critics.step()
        critics.zero_grad()
        for number, (x, y) in enumerate(run.lanes(batch)):
            (-loss_of(critic, fakes[number], y)).backward()
        generators.step()
        generators.zero_grad()
        critics.zero_grad()
