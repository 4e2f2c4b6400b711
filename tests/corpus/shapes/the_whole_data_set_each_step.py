"""All of a small data set in every step, counted by run.step."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
whole = samples().tensors
for epoch in run.epochs(20):
    for x, y in run.lanes(whole):
        loss_of(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
