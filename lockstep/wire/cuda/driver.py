"""The few calls of CUDA's driver that torch does not offer, for the calling thread's current device.

torch makes a context current in every thread that uses a GPU: callers have done so.
"""

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch

from lockstep.errors import BadEnvironment

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_PORTABLE, _MAPPED = 1, 2
_WAIT_VALUE, _WRITE_VALUE = 1, 2
_AT_LEAST = 0


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class StreamOperation(ctypes.Structure):
    """A wait or a write of one 32-bit number, in a stream: the driver's CUstreamBatchMemOpParams."""

    _fields_ = [
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    ]

    @classmethod
    def write(cls, address: int) -> "StreamOperation":
        """A worker that reads the number also sees everything before it in the stream."""
        return cls(_WRITE_VALUE, address, 0, 0, 0, 0)

    @classmethod
    def wait(cls, address: int) -> "StreamOperation":
        """What follows in the stream waits until the number is at least `value`, as 32-bit numbers that wrap around."""
        return cls(_WAIT_VALUE, address, 0, _AT_LEAST, 0, 0)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, calls are for `device`, whose context torch has made current."""
    return torch.cuda.device(device)


def allocate(num_bytes: int) -> int:
    """The address of new memory on the current device, outside of torch's own allocator."""
    address = ctypes.c_uint64()
    _check(_driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)), f"allocating {num_bytes} bytes")
    return address.value


def free(address: int) -> None:
    _check(_driver().cuMemFree_v2(ctypes.c_uint64(address)), "freeing memory")


def copy(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Puts a copy between two addresses on GPUs into the stream. Returns at once."""
    _check(
        _driver().cuMemcpyDtoDAsync_v2(
            ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream)
        ),
        f"copying {num_bytes} bytes",
    )


def handle_of(address: int) -> bytes:
    """The handle by which another process can open memory made by `allocate`."""
    handle = _Handle()
    _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address)), "sharing GPU memory")
    return bytes(handle)


def open_handle(handle: bytes) -> int:
    """The address, in this process, of another process's memory on this device or one with peer access."""
    address = ctypes.c_uint64()
    given = _Handle.from_buffer_copy(handle)
    _check(
        _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS)),
        "opening another worker's GPU memory",
    )
    return address.value


def close_handle(address: int) -> None:
    _check(_driver().cuIpcCloseMemHandle(ctypes.c_uint64(address)), "closing another worker's GPU memory")


def register(address: int, num_bytes: int) -> int:
    """The GPU's address of this host memory, valid until `unregister`."""
    driver, place = _driver(), ctypes.c_uint64()
    flags = ctypes.c_uint(_PORTABLE | _MAPPED)
    _check(
        driver.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), flags),
        "showing shared memory to the GPU",
    )
    _check(
        driver.cuMemHostGetDevicePointer_v2(ctypes.byref(place), ctypes.c_void_p(address), ctypes.c_uint(0)),
        "finding shared memory on the GPU",
    )
    return place.value


def unregister(address: int) -> None:
    _check(_driver().cuMemHostUnregister(ctypes.c_void_p(address)), "hiding shared memory from the GPU")


def operations(stream: int, batch: "ctypes.Array[StreamOperation]") -> None:
    """Puts these waits and writes into the stream, in their order. Returns at once."""
    _check(
        _driver().cuStreamBatchMemOp_v2(
            ctypes.c_void_p(stream), ctypes.c_uint(len(batch)), ctypes.byref(batch), ctypes.c_uint(0)
        ),
        "ordering streams",
    )


def load(binary: bytes, name: str) -> ctypes.c_void_p:
    """A kernel of a compiled module, which stays loaded with the process."""
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(binary)), "loading a kernel")
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "finding a kernel")
    return function


def launch(
    function: ctypes.c_void_p, num_blocks: int, num_threads: int, stream: int, arguments: Sequence[ctypes.c_uint64]
) -> None:
    """Starts a kernel whose arguments are all 64 bits wide. Returns at once."""
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    one = ctypes.c_uint(1)
    _check(
        _driver().cuLaunchKernel(
            function, ctypes.c_uint(num_blocks), one, one, ctypes.c_uint(num_threads), one, one,
            ctypes.c_uint(0), ctypes.c_void_p(stream), pointers, None,
        ),
        "starting a kernel",
    )  # fmt: skip


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BadEnvironment(
            f"CUDA's driver cannot be loaded ({error}): install NVIDIA's driver, or start with device='cpu'"
        ) from error


def _check(result: int, doing: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        why = text.value.decode() if text.value else f"error {result}"
        raise BadEnvironment(f"CUDA refused {doing}: {why}")
