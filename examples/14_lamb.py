"""A small GPT on large batches with LAMB: Adam, with a rate for every tensor.

    python examples/14_lamb.py
    lockstep run -n 2 examples/14_lamb.py

LAMB is the optimizer with which BERT was trained on batches of 32,768. It takes the place of AdamW in
one line. Its text is made of a few words, so the loss falls quickly from that of guessing letters,
ln 27 = 3.3, towards that of guessing words. Look at the digest: it is the same on any number of
workers.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.optim import LAMB, WarmUp, exclude_biases_and_norms

LETTERS = "abcdefghijklmnopqrstuvwxyz "
WORDS = ("every", "worker", "takes", "the", "same", "step", "and", "nobody", "waits")
CONTEXT = 32


def sentences(num_sentences: int) -> TensorDataset:
    """Random words, cut into pieces of 33 letters."""
    drawn = torch.randint(0, len(WORDS), (num_sentences, CONTEXT))
    texts = [" ".join(WORDS[word] for word in row)[: CONTEXT + 1] for row in drawn.tolist()]
    return TensorDataset(torch.tensor([[LETTERS.index(letter) for letter in text] for text in texts]))


class Gpt(nn.Module):
    """A decoder of two blocks with learned positions."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.letters, self.positions = nn.Embedding(len(LETTERS), width), nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.scores = nn.Linear(width, len(LETTERS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        stream = self.letters(text) + self.positions.weight
        return self.scores(self.blocks(stream, mask=self.mask, is_causal=True))


def main() -> None:
    run = lockstep.start(lanes=8)
    torch.manual_seed(0)
    loader = run.shard(DataLoader(sentences(1024), batch_size=128, shuffle=True))
    model = Gpt()
    optimizer = LAMB(exclude_biases_and_norms(model, weight_decay=0.01), lr=0.02)
    scheduler = WarmUp(optimizer, epochs=1, steps_per_epoch=len(loader), start=0.1)
    run.replicate(model, optimizer, scheduler=scheduler)

    for epoch in run.epochs(4):
        for batch in loader:
            for (text,) in run.lanes(batch):
                scores = model(text[:, :-1])
                run.backward(F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        run.print(f"epoch {epoch}  rate {optimizer.param_groups[0]['lr']:.4f}  loss {run.loss:.6f}")

    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
