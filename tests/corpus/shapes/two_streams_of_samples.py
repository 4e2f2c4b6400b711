"""Labelled and unlabelled samples in one batch, by a sampler over two streams, of which one never ends."""

import itertools

import lockstep
import numpy as np
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)


def once(indices):
    return np.random.permutation(indices)


def for_ever(indices):
    def shuffles():
        while True:
            yield np.random.permutation(indices)

    return itertools.chain.from_iterable(shuffles())


def grouped(stream, size):
    return zip(*[iter(stream)] * size)


class TwoStreams(torch.utils.data.Sampler):
    def __init__(self, first, second, first_size, second_size):
        self.first, self.second, self.first_size, self.second_size = first, second, first_size, second_size

    def __len__(self):
        return len(self.first) // self.first_size

    def __iter__(self):
        both = zip(grouped(once(self.first), self.first_size), grouped(for_ever(self.second), self.second_size))
        return (first + second for first, second in both)


model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
sampler = TwoStreams(list(range(20, 90)), list(range(20)), 12, 4)
loader = run.shard(DataLoader(samples(), batch_sampler=sampler))
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
