"""Writes the final state of a run to a file, so that two runs can be measured against each other."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lockstep.events import Closed, Event


class Dump:
    """A subscriber that leaves every tensor of `state()` in one safetensors file when the run ends."""

    def __init__(self, path: Path, state: Callable[[], Mapping[str, Any]]) -> None:
        self._path = path
        self._state = state

    def __call__(self, event: Event) -> None:
        if isinstance(event, Closed):
            save_file({name: _own(v) for name, v in self._state().items() if torch.is_tensor(v)}, self._path)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that shares no memory: the format refuses tensors that do."""
    return tensor.detach().cpu().contiguous().clone()
