"""Mixed precision: forward passes in bfloat16, or in float16 with a GradScaler.

    python examples/07_mixed_precision.py
    lockstep run -n 2 examples/07_mixed_precision.py
    lockstep run -n 2 examples/07_mixed_precision.py --dtype float16

`torch.autocast` stands inside the lanes, as it stands in any loop. The scaler sees the step's
gradient, the same on every worker, so all workers skip the same steps. Its first scale is far too
large here on purpose. Look at the skipped steps and at the digest: both are the same on any number
of workers.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def parabolas(num_points: int) -> TensorDataset:
    """Eight coefficients each, and whether the polynomial they stand for is positive at 0.7."""
    coefficients = torch.randn(num_points, 8)
    value = (coefficients * 0.7 ** torch.arange(8)).sum(1)
    return TensorDataset(coefficients, (value > 0).long())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    return parser.parse_args()


def main() -> None:
    dtype = getattr(torch, parse().dtype)
    run = lockstep.start(lanes=4)
    loader = run.shard(DataLoader(parabolas(800), batch_size=100, shuffle=True))
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=2.0**24, enabled=dtype is torch.float16)
    run.replicate(model, optimizer, scaler=scaler)

    num_skipped = 0
    for epoch in run.epochs(4):
        for batch in loader:
            for x, y in run.lanes(batch):
                with torch.autocast(run.device.type, dtype=dtype):
                    scores = model(x)
                    loss = F.cross_entropy(scores, y)
                run.backward(loss, scaler=scaler)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            num_skipped += scaler.get_scale() < scale
            optimizer.zero_grad()
        run.print(f"epoch {epoch}  loss {run.loss:.6f}  scores in {scores.dtype}")

    run.print(f"steps {run.step}  skipped {num_skipped}  scale {scaler.get_scale():.0f}")
    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
