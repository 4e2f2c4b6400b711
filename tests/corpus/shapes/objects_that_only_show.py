"""A meter, a logger, a timer, and an average of the weights that is tracked, and swapped in for evaluations."""

import lockstep
import torch
from corpus_parts import *

run = lockstep.start(lanes=6, seed=1)


class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.sum = 0.0
        self.n = 0

    def update(self, value, n=1):
        self.sum += value * n
        self.n += n

    @property
    def avg(self):
        return self.sum / max(1, self.n)


class Logger:
    def __init__(self):
        self.calls = 0
        self.lines = []

    def step(self, text):
        self.calls += 1
        self.lines.append(text)
        if self.calls % 5 == 0:
            print("log", self.calls)


class Timer:
    def __init__(self):
        self.k = 0

    def step(self):
        self.k += 1


class Logged:
    def __init__(self, opt):
        self.opt = opt
        self.n = 0

    def step(self):
        self.opt.step()
        self.n += 1
        if self.n % 4 == 0:
            print("stepped", self.n)

    def zero_grad(self):
        self.opt.zero_grad()


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.backup = {}

    def update(self, model):
        for n, p in model.named_parameters():
            self.shadow[n] = (1 - self.decay) * p.data + self.decay * self.shadow[n]

    def apply(self, model):
        for n, p in model.named_parameters():
            self.backup[n] = p.data.clone()
            p.data.copy_(self.shadow[n])

    def restore(self, model):
        for n, p in model.named_parameters():
            p.data.copy_(self.backup[n])

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]


class Config:
    def __init__(self):
        self.lr = 1e-2
        self.seen = 0


cfg = Config()
model = network()
optimizer = torch.optim.AdamW(model.parameters(), cfg.lr)
ema = EMA(model, 0.9)
run.replicate(model, optimizer, ema=ema)
loader = run.shard(plain_loader())
val = run.shard(plain_loader(shuffle=False))
losses = AverageMeter()
logger, timer, wrapped = Logger(), Timer(), Logged(optimizer)
for epoch in run.epochs(EPOCHS):
    losses.reset()
    for batch in loader:
        for x, y in run.lanes(batch):
            loss_of(model, x, y).backward()
        wrapped.step()
        wrapped.zero_grad()
        ema.update(model)
        losses.update(run.loss or 1.0, 16)
        cfg.seen += 16
        logger.step(f"loss {losses.avg}")
        timer.step()
    ema.apply(model)
    with torch.no_grad():
        for batch in val:
            for x, y in run.lanes(batch):
                loss_of(model, x, y)
    ema.restore(model)
