"""Host memory between which and a GPU copies go by themselves, at full speed."""

import weakref

import torch


def pin(memory: torch.Tensor) -> bool:
    """Locks mapped host memory as long as this tensor lives; whether that could be done. Copies are right without."""
    runtime = torch.cuda.cudart()
    address = memory.data_ptr()
    if runtime.cudaHostRegister(address, memory.nbytes, 0) != runtime.cudaError.success:
        return False
    weakref.finalize(memory, _unpin, address).atexit = False
    return True


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
