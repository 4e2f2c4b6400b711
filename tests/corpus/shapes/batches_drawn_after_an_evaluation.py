"""As nanoGPT does: rank 0 estimates the loss, then all draw their batches from the same generator."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
data = samples().tensors


def get_batch():
    index = torch.randint(90, (16,))
    return data[0][index], data[1][index]


while run.step < 20:
    if run.step % 5 == 0 and run.rank == 0:
        with torch.no_grad():
            estimate = sum(float(loss_of(model, *get_batch())) for _ in range(3))
    for x, y in run.lanes(get_batch()):
        loss_of(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
