"""At the head of each epoch's body the teacher gets the weights of the model."""

import copy

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
teacher, optimizer = copy.deepcopy(model), adam(model)
run.replicate(model, optimizer)
run.replicate(teacher)
loader = run.shard(plain_loader())

for epoch in run.epochs(EPOCHS):
    teacher.load_state_dict(model.state_dict())
    for batch in loader:
        for x, y in run.lanes(batch):
            with torch.no_grad():
                wanted = teacher(x).softmax(1)
            (loss_of(model, x, y) + F.cross_entropy(model(x), wanted)).backward()
        optimizer.step()
        optimizer.zero_grad()
