"""A factor of the inputs is a variable that two closures share; one reads it, the other changes it after each update."""

import lockstep
import torch
from corpus_parts import *


def factor():
    now = 1.0

    def read():
        return now

    def advance():
        nonlocal now
        now *= 0.95

    return read, advance


run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
read, advance = factor()
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss = loss_of(model, x * read(), y)
            run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        advance()
