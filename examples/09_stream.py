"""A stream: an IterableDataset with no length and no indices.

    python examples/09_stream.py
    lockstep run -n 3 examples/09_stream.py

Nothing is to be split by rank in the data set: every worker reads the stream and keeps what belongs
to its lanes. Look at the number of readings, which is that of one pass whatever the number of
workers, and at the learned rule.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import lockstep

RULE = torch.tensor([1.5, -2.0, 0.5])


class Readings(IterableDataset):
    """Three sensors and a fourth that follows them by RULE, until the line goes dead."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(1000):
            sensors = torch.randn(3)
            yield sensors, sensors @ RULE + 0.1 * torch.randn(())


def main() -> None:
    run = lockstep.start(lanes=6)
    loader = run.shard(DataLoader(Readings(), batch_size=64))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.replicate(model, optimizer)

    for epoch in run.epochs(2):
        num_readings = 0
        for batch in loader:
            num_readings += len(batch)  # of the global batch, not of this worker's part
            for sensors, wanted in run.lanes(batch):
                run.backward(F.mse_loss(model(sensors).squeeze(1), wanted))
            optimizer.step()
            optimizer.zero_grad()
        run.print(f"epoch {epoch}  readings {num_readings}  loss of the last batch {run.loss:.6f}")

    run.print("learned", [round(weight, 2) for weight in model.weight[0].tolist()], "wanted", RULE.tolist())
    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
