"""Memory at an address as a tensor, without a copy. Somebody else keeps it."""

import ctypes

import torch


class Piece:
    """Memory of a GPU at an address, as torch takes it from others."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(address: int, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat tensor."""
    num_bytes = num_elements * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(0, dtype=dtype, device=device)
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=dtype)
    return torch.as_tensor(Piece(address, num_bytes), device=device).view(dtype)
