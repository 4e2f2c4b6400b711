"""One copy of the optimizer state on a host: each worker updates its part, with the same bits as four copies.

    python examples/19_sharded.py
    lockstep run -n 4 examples/19_sharded.py
    lockstep run -n 4 --strategy replicated examples/19_sharded.py

The training is that of 02_lockstep.py with a wider model and clipped gradients. With `strategy=` the
workers of a host hold parameters and AdamW's state once, in memory that all of them see, and each
updates an equal part; on GPUs each has all parameters, and AdamW's state of its part. The loop does
not change. Look at the digest: it is the same under both strategies, on any number of workers.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.strategies import Sharded


def main() -> None:
    run = lockstep.start(lanes=8, strategy=Sharded("optimizer"))
    torch.manual_seed(0)
    x = torch.randn(1024, 20)
    loader = run.shard(DataLoader(TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long()), batch_size=128, shuffle=True))
    model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    run.replicate(model, optimizer)

    for epoch in run.epochs(4):
        for batch in loader:
            for inputs, labels in run.lanes(batch):
                run.backward(F.cross_entropy(model(inputs), labels))
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        run.print(f"epoch {epoch}  loss {run.loss:.6f}")

    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
