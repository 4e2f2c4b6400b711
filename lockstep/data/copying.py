"""Copies of data that user code may write to, and whether it has."""

from typing import Any

import torch

from lockstep.data.cut import opened


def copied(part: Any) -> Any:
    """The same structure with tensors and arrays of its own; plain values are shared."""
    if isinstance(part, torch.Tensor):
        return part.clone()
    structure = opened(part)
    if structure is not None:
        return structure.rebuilt([copied(inner) for _, inner in structure.parts])
    return part.copy() if hasattr(part, "tobytes") and hasattr(part, "copy") else part


def versions_of(part: Any) -> list[int]:
    """A number for each tensor that is another one after a write to it in place; arrays and plain values have none."""
    if isinstance(part, torch.Tensor):
        return [] if part.is_inference() else [part._version]
    structure = opened(part)
    return [] if structure is None else [version for _, inner in structure.parts for version in versions_of(inner)]
