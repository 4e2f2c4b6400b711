"""Copies of data that user code may write to."""

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
