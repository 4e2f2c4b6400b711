"""GPU memory that the workers of one host open to each other.

# Note [Memory is kept]
# A process may not free GPU memory that another one has open. So memory that a bucket releases is kept for the next one
# that fits in; peers have it open already then. It is freed when the wire is closed and no tensor views it any more
# (`p.grad` may).
"""

import ctypes
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch

from lockstep.wire.cuda import driver

MOST_WASTE = 2
"""A kept piece is used again only for a request of at least one part in so many of it."""


class DeviceMemory:
    """The memory that this worker has allocated on its GPU, and that it has opened of others. Its owner closes it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._numbers = count()
        self._own: dict[int, tuple[int, torch.Tensor]] = {}
        self._kept: list[torch.Tensor] = []
        self._opened: dict[tuple[int, int], int] = {}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Bytes that peers can open. Any thread. See Note [Memory is kept]."""
        fitting = [piece for piece in self._kept if num_bytes <= piece.numel() <= MOST_WASTE * num_bytes]
        if fitting:
            best = min(fitting, key=torch.Tensor.numel)
            self._kept = [piece for piece in self._kept if piece is not best]
            return best[:num_bytes]
        with driver.on(self.device):
            address = driver.allocate(num_bytes)
        whole = tensor_at(address, num_bytes, torch.uint8, self.device, partial(_free, self.device))
        self._own[whole.data_ptr()] = (next(self._numbers), whole)
        return whole

    def release(self, tensor: torch.Tensor) -> None:
        """The memory under the tensor may be used for other tensors."""
        if (own := self._own.get(tensor.data_ptr())) is not None:
            self._kept.append(own[1])

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor begins where memory of this worker does."""
        return tensor.data_ptr() in self._own

    def shown(self, tensor: torch.Tensor) -> tuple[int, str]:
        """The number and the handle of the memory under a tensor, for `opened` elsewhere."""
        number, whole = self._own[tensor.data_ptr()]
        return number, driver.handle_of(whole.data_ptr()).hex()

    def opened(self, peer: int, number: int, handle: str) -> int:
        """The address here of the memory that worker `peer` has `shown`."""
        if (peer, number) not in self._opened:
            with driver.on(self.device):
                self._opened[peer, number] = driver.open_handle(bytes.fromhex(handle))
        return self._opened[peer, number]

    def close(self) -> None:
        """Releases all memory, own and opened. May be called only when no work on it runs."""
        opened, self._opened = self._opened, {}
        with driver.on(self.device):
            for address in opened.values():
                driver.close_handle(address)
        self._own, self._kept = {}, []


def _free(device: torch.device, address: int) -> None:
    """Runs in the thread in which the last tensor dies."""
    with driver.on(device):
        driver.free(address)


# -- memory at an address as a tensor, without a copy --------------------------------------------------------------


class _Piece:
    """Memory of a GPU at an address, as torch takes it from others."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(
    address: int,
    num_elements: int,
    dtype: torch.dtype,
    device: torch.device,
    at_last: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """A flat tensor. The caller keeps the memory; or `at_last` is called with it when no tensor views it any more."""
    num_bytes = num_elements * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(0, dtype=dtype, device=device)
    there: Any
    if device.type == "cpu":
        there = (ctypes.c_char * num_bytes).from_address(address)
        flat = torch.frombuffer(there, dtype=dtype)
    else:
        there = _Piece(address, num_bytes)
        flat = torch.as_tensor(there, device=device).view(dtype)
    if at_last is not None:
        weakref.finalize(there, at_last, address).atexit = False
    return flat
