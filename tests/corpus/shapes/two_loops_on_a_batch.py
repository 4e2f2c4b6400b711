"""A critic and a generator: two loops over each batch, two optimizers."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
critic, generator = network(), network()
critics, generators = adam(critic), torch.optim.SGD(generator.parameters(), 0.05)
run.replicate(critic, critics)
run.replicate(generator, generators)
loader = run.shard(plain_loader())
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(critic, x, y).backward()
        critics.step()
        critics.zero_grad()
        for x, y in run.lanes(batch):
            (loss_of(generator, x, y) + critic(x).square().mean()).backward()
        generators.step()
        generators.zero_grad()
        critics.zero_grad()
