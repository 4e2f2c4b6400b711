"""What the demo learns: Python's own standard library, as bytes, cut into windows."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.errors import BadEnvironment

Window = tuple[Tensor, Tensor]
"""Bytes, and for each of them the byte that comes next."""


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
