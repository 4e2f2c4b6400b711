"""A small GPT on random windows of a text: a rate by hand, accumulation, clipping, an estimate now and then."""

import math
import time

import torch
from torch import nn
from torch.nn import functional as F

out = "gpt.pt"
eval_interval, eval_iters, log_interval = 4, 3, 2
gradient_accumulation_steps, batch_size, block_size = 2, 8, 16
learning_rate, min_lr, max_iters, warmup_iters = 1e-2, 1e-3, 8, 2
weight_decay, grad_clip = 1e-1, 1.0
device = "cuda" if torch.cuda.is_available() else "cpu"
master_process = True

if master_process:
    print(f"tokens per iteration: {gradient_accumulation_steps * batch_size * block_size}")
torch.manual_seed(1337)

text = torch.randint(0, 32, (2000,), generator=torch.Generator().manual_seed(0)).cumsum(0) % 32
train_data, val_data = text[:1800], text[1800:]


def get_batch(split, batch_size):
    data = train_data if split == "train" else val_data
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x.to(device), y.to(device)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, 32), nn.Embedding(block_size, 32)
        self.block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 32, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(block_size), persistent=False)

    def forward(self, idx, targets):
        x = self.tokens(idx) + self.places.weight
        logits = self.head(self.block(x, src_mask=self.mask, is_causal=True))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def estimate_loss():
    found = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split, batch_size)
            logits, loss = model(X, Y)
            losses[k] = loss.item()
        found[split] = losses.mean()
    model.train()
    return found


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
best_val_loss, iter_num = 1e9, 0
X, Y = get_batch("train", batch_size)
t0 = time.time()
while True:
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss and master_process:
            best_val_loss = losses["val"]
            torch.save({"model": model.state_dict(), "iter_num": iter_num}, out)
    for micro_step in range(gradient_accumulation_steps):
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train", batch_size)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}")
        t0 = time.time()
    iter_num += 1
    if iter_num >= max_iters:
        break
