"""The best weights are kept in a variable that is None at first, and training goes back to them once."""

import copy

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())

best_state = None
for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if epoch == 0:
        best_state = copy.deepcopy(model.state_dict())
    if epoch == 2 and best_state is not None:
        model.load_state_dict(best_state)
