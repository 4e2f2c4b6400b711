"""Writes the final state of a run to a file, so that two runs can be measured against each other."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.events import Closed, Event
from lockstep.state.tensor_file import write_tensors


class Dump:
    """A subscriber that leaves every tensor of `state()` in one safetensors file when the run ends."""

    def __init__(self, path: Path, state: Callable[[], Mapping[str, Any]]) -> None:
        self._path = path
        self._state = state

    def __call__(self, event: Event) -> None:
        if isinstance(event, Closed):
            write_tensors(self._path, {name: v for name, v in self._state().items() if torch.is_tensor(v)})
