"""Truncated back-propagation through time: the hidden state of an RNN goes from batch to batch, with its lane.

    python examples/18_carried.py
    lockstep run -n 3 examples/18_carried.py

Long sequences of bits are read in pieces of 4, and the network must repeat what it read 2 bits before. A plain loop
keeps the state at the end of a piece in a variable. Here it belongs to a lane, and a lane may move to another worker:
so it stands in `run.carried`, which moves with it. Look at the loss: half of the answers stand in the piece before, so
without the state it could not be below 0.34. And look at the digest, the same on any number of workers.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

NUM_SEQUENCES, NUM_PIECES, PIECE, DELAY = 16, 40, 4, 2


class Echo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(1, 16, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, state = self.rnn(x, state)
        return self.head(outputs), state


def pieces() -> TensorDataset:
    """The first pieces of all sequences, then the second ones, and so on: a batch holds one piece of each."""
    bits = torch.randint(0, 2, (NUM_SEQUENCES, NUM_PIECES * PIECE)).float()
    echo = torch.roll(bits, DELAY, dims=1)
    x, y = (
        whole.view(NUM_SEQUENCES, NUM_PIECES, PIECE, 1).transpose(0, 1).reshape(-1, PIECE, 1) for whole in (bits, echo)
    )
    return TensorDataset(x, y)


def main() -> None:
    run = lockstep.start(lanes=4)
    loader = run.shard(DataLoader(pieces(), batch_size=NUM_SEQUENCES))  # in order: sample i goes on with sequence i
    model = Echo()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    run.replicate(model, optimizer)

    for epoch in run.epochs(2):
        for batch in loader:
            is_first = run.step % len(loader) == 0  # counted by run.step: right after a resume too
            for x, y in run.lanes(batch):
                answers, state = model(x, None if is_first else run.carried["state"])
                run.carried["state"] = state.detach()
                run.backward(F.binary_cross_entropy_with_logits(answers, y))
            optimizer.step()
            optimizer.zero_grad()
        run.print(f"epoch {epoch}  loss {run.loss:.6f}")
    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
