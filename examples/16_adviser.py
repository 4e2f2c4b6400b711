"""How large a batch is worth having: the run measures the noise of its own gradient, and advises.

    python examples/16_adviser.py
    lockstep run -n 2 --run-dir adviser examples/16_adviser.py
    lockstep advise --run adviser
    lockstep advise --run adviser --workers 32

Look at the critical batch: it is printed with the interval that it is in, gets surer with every epoch, and is
the same on any number of workers. A run ends with two sentences of advice. The third command says more, also
while a run goes on; the fourth says what to do with 32 workers.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def noisy_line(num_samples: int) -> TensorDataset:
    """Points around a plane in 16 dimensions, a good way off it."""
    x = torch.randn(num_samples, 16)
    return TensorDataset(x, x.sum(1, keepdim=True) + 8 * torch.randn(num_samples, 1))


def main() -> None:
    run = lockstep.start(lanes=8, noise_every=2)  # every 200 steps if you say nothing: this training is short
    loader = run.shard(DataLoader(noisy_line(4096), batch_size=32, shuffle=True))
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.replicate(model, optimizer)

    for epoch in run.epochs(2):
        for batch in loader:
            for x, y in run.lanes(batch):
                run.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        noise = run.noise
        run.print(f"epoch {epoch}  loss {run.loss:.6f}  measurements {noise.count}  sure {noise.sure}")
        run.print(f"critical batch {noise.critical_batch:.6g}, between {noise.low:.6g} and {noise.high:.6g}")
    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
