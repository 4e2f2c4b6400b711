"""Forward hooks keep the features of two layers in a table; the loss takes them from there."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
features = {}


def keep(name):
    def hook(module, args, output):
        features[name] = output

    return hook


for name in ("0", "3"):
    model.get_submodule(name).register_forward_hook(keep(name))

for epoch in run.epochs(EPOCHS):
    for batch in loader:
        for x, y in run.lanes(batch):
            loss = loss_of(model, x, y)
            (loss + 0.01 * features["0"].square().mean() + 0.01 * features["3"].abs().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
