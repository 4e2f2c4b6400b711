"""A timeline of some steps: what every worker does, and for whom it waits.

    python examples/20_timeline.py traced
    lockstep run -n 2 examples/20_timeline.py traced
    lockstep explain step traced

The argument is the folder of the timeline. Open traced/timeline.json in ui.perfetto.dev or chrome://tracing. Look at
worker 0: "reduce bucket" stands beside "backward", and arrows lead from the worker that was waited for. The
last command says in ten lines where the time of a step went. `lockstep run --timeline` does the same for all steps
of any script, in the run's own folder.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def text(num_pieces: int, length: int) -> TensorDataset:
    """Pieces of a text in which every letter follows from the one before it, with some noise."""
    letters = torch.cumsum(torch.randint(1, 3, (num_pieces, length + 1)), dim=1) % 32
    return TensorDataset(letters[:, :-1].contiguous(), letters[:, 1:].contiguous())


def network(width: int = 128) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Embedding(32, width), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(width, 32)
    )


def main() -> None:
    run = lockstep.start(lanes=4, bucket_bytes=1 << 18)
    loader = run.shard(DataLoader(text(192, 32), batch_size=16, shuffle=True))
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    run.replicate(model, optimizer)
    run.timeline(steps=10, folder=sys.argv[1])  # the one line this example is about

    for epoch in run.epochs(2):
        for batch in loader:
            for x, y in run.lanes(batch):
                run.backward(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
            optimizer.step()
            optimizer.zero_grad()
        run.print(f"epoch {epoch}  loss {run.loss:.6f}")
    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
