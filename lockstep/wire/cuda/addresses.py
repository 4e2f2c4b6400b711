"""Memory at an address as a tensor, without a copy."""

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import torch


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
    """A flat tensor. Somebody else keeps the memory; or, if nobody looks at it any more, it goes to `at_last`."""
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
