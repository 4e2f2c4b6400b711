"""The script that `lockstep demo` runs on one, two and three workers: a small GPT learns to write Python.

It is what you would write yourself. Nothing in it depends on the number of workers, or on whether some of them are
killed: `run.epochs` is where a replacement finds its place. What it prints, one JSON object a line, is what the
demo's progress bar and report are made of.
"""

import json
import math
import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

import lockstep
from lockstep.errors import BadEnvironment
from lockstep.programs.demo.recipe import Recipe
from lockstep.programs.models import Gpt, GptShape, count_parameters, token_loss
from lockstep.run.run import Run

Window = tuple[Tensor, Tensor]
"""Bytes, and for each of them the byte that comes next."""

TEMPERATURE = 0.85
"""Below 1 the model writes what it finds likely more often than it finds it likely."""


def main(recipe: Recipe) -> None:
    run = lockstep.start(lanes=recipe.lanes, seed=recipe.seed)
    model = Gpt(GptShape(256, recipe.context, recipe.width, recipe.num_blocks, recipe.num_heads))
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, recipe.steps))
    run.replicate(model, optimizer, schedule=schedule)

    text = standard_library(recipe.text_bytes)
    known, held_out = text[: -recipe.held_out_bytes], text[-recipe.held_out_bytes :]
    windows = Windows(known, recipe.context, jitter=True)
    shuffled = RandomSampler(windows, num_samples=recipe.steps * recipe.batch_size)
    loader = run.shard(DataLoader(windows, recipe.batch_size, sampler=shuffled))
    report(run, about={"torch": torch.__version__, "parameters": count_parameters(model)})

    for _ in run.epochs(1):
        for batch in loader:
            for share in run.lanes(batch):
                run.backward(token_loss(model, share))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            report(run, step=run.step, loss=run.loss)

    held_out_loss = evaluate(run, model, Windows(held_out, recipe.context), recipe.batch_size)
    written = write(model, "def ", recipe.written_bytes, seed=recipe.seed)
    report(run, end={"steps": run.step, "digest": run.digest(), "held_out_loss": held_out_loss, "written": written})


def standard_library(max_bytes: int) -> Tensor:
    """The first bytes of this Python's modules, in the order of their names: the same on every worker."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)
    raise BadEnvironment(
        f"the demo learns from the source of Python's standard library and needs {max_bytes:,} bytes of it, "
        f"but {folder} holds {len(text):,}: use a Python that comes with its source"
    )


class Windows(Dataset[Window]):
    """The text in windows of `context` bytes.

    With `jitter` each begins a little later, by chance: lockstep ties it to the window, not to the reader.
    """

    def __init__(self, text: Tensor, context: int, jitter: bool = False) -> None:
        self._text, self._context, self._jitter = text, context, jitter

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context - 1

    def __getitem__(self, index: int) -> Window:
        begin = index * self._context
        if self._jitter:
            begin += int(torch.randint(self._context, ()))
        window = self._text[begin : begin + self._context + 1].long()
        return window[:-1], window[1:]


def rate(step: int, num_steps: int) -> float:
    """Part of the learning rate at a step: up a line for a tenth of the steps, then down a cosine."""
    return min((step + 1) / (num_steps // 10 + 1), (1 + math.cos(math.pi * step / num_steps)) / 2)


@torch.no_grad()
def evaluate(run: Run, model: Gpt, windows: Windows, batch_size: int) -> float:
    """The mean loss per byte: every window counts once, and the bits are the same on any workers."""
    losses, num_bytes = [], 0
    model.eval()
    for batch in run.shard(DataLoader(windows, batch_size)):
        for known, following in run.lanes(batch):
            scores = model(known).flatten(0, 1)
            losses.append(F.cross_entropy(scores, following.flatten(), reduction="sum").item())
            num_bytes += following.numel()
    return float(run.total(losses) / run.total(num_bytes))


@torch.no_grad()
def write(model: Gpt, beginning: str, num_bytes: int, seed: int) -> str:
    """What the model writes after `beginning`. Every worker writes the same, so only one has to show it."""
    device = next(model.parameters()).device
    chance = torch.Generator(device).manual_seed(seed)
    text = torch.tensor([list(beginning.encode())], device=device)
    for _ in range(num_bytes):
        scores = model(text[:, -model.shape.context :])[0, -1]
        following = torch.multinomial((scores / TEMPERATURE).softmax(0), 1, generator=chance)
        text = torch.cat([text, following[None]], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def report(run: Run, **facts: object) -> None:
    """Prints the facts once, as one line of JSON."""
    run.print(json.dumps(facts))


if __name__ == "__main__":
    main(Recipe.read(sys.argv[1]))
