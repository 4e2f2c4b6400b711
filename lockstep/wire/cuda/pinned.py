"""Host memory between which and a GPU copies go by themselves, at full speed."""

import weakref
from contextlib import suppress

import torch


def pin(memory: torch.Tensor) -> bool:
    """Locks mapped host memory as long as this tensor lives; whether that could be done. Copies are right without."""
    runtime = torch.cuda.cudart()
    address = memory.data_ptr()
    if runtime.cudaHostRegister(address, memory.nbytes, 0) != runtime.cudaError.success:
        _forget_error()
        return False
    weakref.finalize(memory, _unpin, address).atexit = False
    return True


def _unpin(address: int) -> None:
    runtime = torch.cuda.cudart()
    if runtime.cudaHostUnregister(address) != runtime.cudaError.success:
        _forget_error()


def _forget_error() -> None:
    """CUDA keeps an error for whoever asks next: that would be torch, at a kernel that has nothing to do with it."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
