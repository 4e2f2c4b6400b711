"""train_one_epoch(...) with counters of its own that are printed."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())


def train_one_epoch(epoch):
    seen, total = 0, 0.0
    for number, batch in enumerate(loader):
        for x, y in run.lanes(batch):
            run.backward(loss_of(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
        seen += len(batch)
        total += run.loss
        if number % 4 == 0:
            run.print(f"{seen} samples, mean loss {total / (number + 1):.3f}")


def main():
    for epoch in run.epochs(EPOCHS):
        train_one_epoch(epoch)


main()
