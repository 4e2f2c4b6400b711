"""Whatever goes wrong with a batch is caught, and the next one taken; updates are counted by a number of its own."""

import lockstep
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)
model = network()
optimizer = adam(model)
run.replicate(model, optimizer)
loader = run.shard(plain_loader())
count = 0

for epoch in run.epochs(EPOCHS):
    for batch in loader:
        try:
            for x, y in run.lanes(batch):
                loss_of(model, x, y).backward()
            count += 1
            if count % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        except Exception as error:
            print("skipped:", error)
