"""As WGAN does: weights are clamped before each batch; rates of a warm-up are set there, those of epochs at their head."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())


def set_rate(rate):
    for group in optimizer.param_groups:
        group["lr"] = rate


for epoch in run.epochs(EPOCHS):
    set_rate(1e-2 / (1 + epoch))
    optimizer.zero_grad()
    for batch in loader:
        if epoch < 2:
            set_rate(1e-2 * (run.step + 1) / (2 * STEPS))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
