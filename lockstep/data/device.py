"""Brings what lanes are computed from to the run's device, by way of pinned memory.

# Note [Copies on their own stream]
# Tensors go to a GPU from pinned memory on a stream of their own, so that the copy runs beside the kernels that are
# still queued. The stream that is current when the data are handed out waits for the copy, and the allocator knows both
# streams, so that it does not reuse the memory while a kernel may read it. A loader's batch is new memory each time.
# Users may write to memory of their own as soon as it was handed out: if it is pinned, the host waits for the copy.
"""

from collections.abc import Callable
from typing import Any

import torch

from lockstep.data.structure import opened

CPU = torch.device("cpu")


def unchanged(part: Any) -> Any:
    return part


def to_device(part: Any, device: torch.device, others: Callable[[Any], Any] = unchanged) -> Any:
    """The same structure with its CPU tensors on `device`; every other part is passed through `others`.

    Objects with a `.to(device)` of their own are moved by it. With the CPU as device the very same object comes back.
    """
    return part if device.type == "cpu" else _rebuilt(part, device, lambda tensor: tensor.to(device), others)


class DeviceMover:
    """Brings data to one device, on a stream of its own if that is a GPU. See Note [Copies on their own stream]."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._has_copied = False

    @property
    def pins(self) -> bool:
        """Whether loaders should load into pinned memory."""
        return self.device.type == "cuda"

    def __call__(self, part: Any, others: Callable[[Any], Any] = unchanged, *, is_users: bool = False) -> Any:
        """As `to_device`; the current stream may use the result at once. If `is_users`, the user may change `part`."""
        if self.device.type != "cuda":
            return to_device(part, self.device, others)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._has_copied = False
        there = _rebuilt(part, self.device, self._copy_of_users if is_users else self._copy, others)
        if self._has_copied:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return there

    def _copy_of_users(self, tensor: torch.Tensor) -> torch.Tensor:
        """torch reads memory that is not pinned before it returns; for pinned memory the host must wait."""
        return self._copy(tensor, waits=tensor.is_pinned())

    def _copy(self, tensor: torch.Tensor, waits: bool = False) -> torch.Tensor:
        self._has_copied = True
        with torch.cuda.stream(self._stream):
            there = tensor.to(self.device, non_blocking=not waits)
        there.record_stream(torch.cuda.current_stream(self.device))
        return there


def pinned(part: Any) -> Any:
    """The same structure with its tensors in pinned memory; what cannot be pinned stays as it is."""
    structure = opened(part)
    if structure is not None:
        return structure.rebuilt([pinned(inner) for _, inner in structure.parts])
    device = getattr(part, "device", None)  # a tensor on a GPU has its own memory
    can_be_pinned = callable(getattr(part, "pin_memory", None)) and getattr(device, "type", "cpu") == "cpu"
    return part.pin_memory() if can_be_pinned else part


def _rebuilt(
    part: Any,
    device: torch.device,
    copy: Callable[[torch.Tensor], torch.Tensor],
    others: Callable[[Any], Any],
) -> Any:
    if isinstance(part, torch.Tensor):
        return copy(part) if part.device.type == "cpu" else others(part)
    if callable(getattr(part, "to", None)) and not isinstance(part, type):
        return part.to(device)
    structure = opened(part)
    if structure is not None:
        return structure.rebuilt([_rebuilt(inner, device, copy, others) for _, inner in structure.parts])
    return others(part)
