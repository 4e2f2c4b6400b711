"""Uneven data: the mean over all tokens, where averaging the workers gives something else.

    python examples/04_uneven.py
    lockstep run -n 2 examples/04_uneven.py

Sentences are sorted by length, as they are where padding shall be saved, so some lanes hold many
times the tokens of others. Look at the errors against one device on the whole batch: giving each
lane its number of tokens as weight leaves only rounding; counting all lanes alike, as an average
over workers does, leaves another gradient.
"""

import torch
import torch.nn.functional as F
from torch import nn

import lockstep

PAD = 0
VOCABULARY = 20


def sentences(num_sentences: int) -> torch.Tensor:
    """Padded sentences of 2 to 40 tokens, shortest first; each token follows from the one before it."""
    lengths = torch.randint(2, 41, (num_sentences,)).sort().values
    tokens = [torch.randint(1, VOCABULARY, (num_sentences,))]
    for _ in range(39):
        noise = torch.randint(0, 3, (num_sentences,))
        tokens.append((3 * tokens[-1] + noise) % (VOCABULARY - 1) + 1)
    padded = torch.stack(tokens, dim=1)
    return padded.masked_fill(torch.arange(40) >= lengths[:, None], PAD)


def token_loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The mean loss over the tokens to be predicted, and how many there are."""
    inputs, targets = batch[:, :-1], batch[:, 1:]
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PAD)
    return loss, int((targets != PAD).sum())


def take_gradient(model: nn.Module) -> torch.Tensor:
    """All of `p.grad` as one vector; afterwards there is none."""
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return gradient


def main() -> None:
    run = lockstep.start(lanes=6)
    batch = sentences(50)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    token_loss(model, batch)[0].backward()  # one device, the whole batch
    wanted = take_gradient(model).to(run.device)

    run.replicate(model, optimizer)
    for name, by_tokens in (("weighted by tokens", True), ("all lanes alike   ", False)):
        for lane in run.lanes(batch):
            loss, num_tokens = token_loss(model, lane)
            run.backward(loss, weight=num_tokens if by_tokens else 1)
        error = (take_gradient(model) - wanted).norm() / wanted.norm()
        run.print(f"{name}  error of the gradient {error.item():.1e}")

    for _ in range(30):
        for lane in run.lanes(batch):
            loss, num_tokens = token_loss(model, lane)
            run.backward(loss, weight=num_tokens)
        optimizer.step()
        optimizer.zero_grad()
    run.print(f"loss per token {run.loss:.6f}")
    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
