"""The few calls of CUDA's driver and compiler that torch does not offer, by NVIDIA's cuda-bindings.

All calls are for the calling thread's current device. torch makes a context current in every thread that uses a GPU:
callers have done so.
"""

import ctypes
import importlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch

from lockstep.errors import BadEnvironment

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_PORTABLE, _MAPPED = 1, 2


class StreamBatch:
    """A write of one 32-bit number in a stream, then waits until other numbers are at least as large, wrapping around.

    Everything before the write in the stream is visible to every worker that sees the number. What follows in the
    stream runs after the waits.
    """

    def __init__(self, write: int, waits: Iterable[int]) -> None:
        self.write, self.waits = write, list(waits)
        self._operations: list[Any] = []

    def put(self, stream: int, value: int) -> None:
        """Into the stream, with `value` to write and to wait for. Returns at once."""
        cuda = _bindings("driver")
        number = cuda.cuuint32_t(value)
        if not self._operations:
            self._operations = [self._made(cuda, address) for address in (self.write, *self.waits)]
        written, *awaited = self._operations
        written.writeValue.value = number
        for operation in awaited:
            operation.waitValue.value = number
        _done(cuda.cuStreamBatchMemOp(stream, len(self._operations), self._operations, 0), "ordering streams")

    def _made(self, cuda: Any, address: int) -> Any:
        operation, kinds = cuda.CUstreamBatchMemOpParams(), cuda.CUstreamBatchMemOpType
        if address == self.write:
            operation.operation = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
            operation.writeValue.address, operation.writeValue.flags = cuda.CUdeviceptr(address), 0
        else:
            operation.operation = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32  # flags 0: at least, as numbers that wrap around
            operation.waitValue.address, operation.waitValue.flags = cuda.CUdeviceptr(address), 0
        return operation


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, calls are for `device`, whose context torch has made current."""
    return torch.cuda.device(device)


def allocate(num_bytes: int) -> int:
    """The address of new memory on the current device, outside of torch's own allocator."""
    return int(_done(_bindings("driver").cuMemAlloc(num_bytes), f"allocating {num_bytes} bytes"))


def free(address: int) -> None:
    _done(_bindings("driver").cuMemFree(address), "freeing memory")


def copy(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Puts a copy between two addresses on GPUs into the stream. Returns at once."""
    _done(_bindings("driver").cuMemcpyDtoDAsync(target, source, num_bytes, stream), f"copying {num_bytes} bytes")


def handle_of(address: int) -> bytes:
    """By which another process can open memory made by `allocate`."""
    return bytes(_done(_bindings("driver").cuIpcGetMemHandle(address), "sharing GPU memory").reserved)


def open_handle(handle: bytes) -> int:
    """The address, in this process, of another process's memory on this device or one with peer access."""
    cuda = _bindings("driver")
    given = cuda.CUipcMemHandle()
    given.reserved = handle
    return int(_done(cuda.cuIpcOpenMemHandle(given, _LAZY_PEER_ACCESS), "opening another worker's GPU memory"))


def close_handle(address: int) -> None:
    _done(_bindings("driver").cuIpcCloseMemHandle(address), "closing another worker's GPU memory")


def register(address: int, num_bytes: int) -> int:
    """Where the GPU sees this host memory from now on, until `unregister`."""
    cuda = _bindings("driver")
    _done(cuda.cuMemHostRegister(address, num_bytes, _PORTABLE | _MAPPED), "showing shared memory to the GPU")
    return int(_done(cuda.cuMemHostGetDevicePointer(address, 0), "finding shared memory on the GPU"))


def unregister(address: int) -> None:
    _done(_bindings("driver").cuMemHostUnregister(address), "hiding shared memory from the GPU")


@lru_cache(maxsize=1)
def compiles() -> bool:
    """Whether NVRTC, which compiles kernels, can be loaded."""
    try:
        return not _bindings("nvrtc").nvrtcVersion()[0]
    except (BadEnvironment, RuntimeError):
        return False


def kernel(source: str, name: str, device: torch.device) -> Any:
    """The kernel `name` of CUDA C for `device`, which stays loaded with the process.

    No option is given that would change the rounding of a sum.
    """
    cuda = _bindings("driver")
    module = _done(cuda.cuModuleLoadData(_compiled(source, name, device)), "loading a kernel")
    return _done(cuda.cuModuleGetFunction(module, name.encode()), "finding a kernel")


def _compiled(source: str, name: str, device: torch.device) -> bytes:
    nvrtc = _bindings("nvrtc")
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}".encode(), b"--fmad=false"]
    program = _done(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []), "making a program")
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), options)[0]:
            log = b" " * int(_done(nvrtc.nvrtcGetProgramLogSize(program), "reading the compiler's log"))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise BadEnvironment(f"NVRTC could not compile {name}: {log.decode().strip()}")
        code = b" " * int(_done(nvrtc.nvrtcGetCUBINSize(program), "compiling a kernel"))
        _done(nvrtc.nvrtcGetCUBIN(program, code), "compiling a kernel")
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def launch(function: Any, num_blocks: int, num_threads: int, stream: int, arguments: Sequence[ctypes.c_uint64]) -> None:
    """Starts a kernel whose arguments are all 64 bits wide. Returns at once."""
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    grid, block = (num_blocks, 1, 1), (num_threads, 1, 1)
    started = _bindings("driver").cuLaunchKernel(function, *grid, *block, 0, stream, ctypes.addressof(pointers), 0)
    _done(started, "starting a kernel")


@lru_cache(maxsize=2)
def _bindings(name: str) -> Any:
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise BadEnvironment(
            "workers that share GPU memory need NVIDIA's cuda-bindings, which come with torch's CUDA builds: "
            'pip install "torch-lockstep[cuda]", or start with wire="nccl" or device="cpu"'
        ) from error


def _done(result: tuple[Any, ...], doing: str) -> Any:
    """What a call gave besides its status; BadEnvironment if it was refused."""
    if result[0]:
        raise BadEnvironment(f"CUDA refused {doing}: {result[0].name}")
    return result[1] if len(result) > 1 else None
