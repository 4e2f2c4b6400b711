"""Brings what lanes are computed from to the run's device.

# Note [Copies on their own stream]
# Tensors go to a GPU from pinned memory on a stream of their own, so that the copy runs beside the kernels that are
# still queued. The stream that is current when the data are handed out waits for the copy, and the allocator is told
# of both streams, so that the memory is not given away while a kernel may read it. A loader's batch is new memory each
# time. What a user has pinned is the user's to write to as soon as it was handed out: then the host waits for the copy.
"""

from collections.abc import Callable
from typing import Any

import torch

from lockstep.data.cut import opened

CPU = torch.device("cpu")


def unchanged(part: Any) -> Any:
    return part


def moved(part: Any, device: torch.device, otherwise: Callable[[Any], Any] = unchanged) -> Any:
    """The same structure with its CPU tensors on `device`; what is no CPU tensor is given to `otherwise`.

    Objects with a `.to(device)` of their own are moved by it. With the CPU as device the very same object comes back.
    """
    return part if device.type == "cpu" else _moved(part, device, lambda tensor: tensor.to(device), otherwise)


class Moving:
    """Moves to one device, on a stream of its own if it is a GPU. See Note [Copies on their own stream]."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._has_carried = False

    @property
    def pins(self) -> bool:
        """Whether what comes from a loader should lie in pinned memory."""
        return self.device.type == "cuda"

    def __call__(self, part: Any, otherwise: Callable[[Any], Any] = unchanged, *, is_users: bool = False) -> Any:
        """As `moved`; may be used on the current stream at once. If it `is_users`, it may be written to after."""
        if self.device.type != "cuda":
            return moved(part, self.device, otherwise)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._has_carried = False
        there = _moved(part, self.device, self._carried_at_once if is_users else self._carried, otherwise)
        if self._has_carried:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return there

    def _carried_at_once(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is not pinned torch reads before it returns; what is, only if it is told to wait."""
        return self._carried(tensor, waits=tensor.is_pinned())

    def _carried(self, tensor: torch.Tensor, waits: bool = False) -> torch.Tensor:
        self._has_carried = True
        with torch.cuda.stream(self._stream):
            there = tensor.to(self.device, non_blocking=not waits)
        there.record_stream(torch.cuda.current_stream(self.device))
        return there


def _moved(
    part: Any,
    device: torch.device,
    carried: Callable[[torch.Tensor], torch.Tensor],
    otherwise: Callable[[Any], Any],
) -> Any:
    if isinstance(part, torch.Tensor):
        return carried(part) if part.device.type == "cpu" else otherwise(part)
    if callable(getattr(part, "to", None)) and not isinstance(part, type):
        return part.to(device)
    structure = opened(part)
    if structure is not None:
        return structure.rebuilt([_moved(inner, device, carried, otherwise) for _, inner in structure.parts])
    return otherwise(part)
