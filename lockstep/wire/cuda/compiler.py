"""Compiles CUDA C for the GPU at hand, by NVIDIA's NVRTC, which comes with a torch that was built for CUDA."""

import ctypes
import importlib.util
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

from lockstep.errors import BadEnvironment


def compiled(source: str, name: str, device: torch.device) -> bytes:
    """Machine code for `device`. No option that would change the rounding of a sum."""
    nvrtc = library()
    if nvrtc is None:
        raise BadEnvironment("NVRTC, which compiles kernels, was not found beside torch")
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}".encode(), b"--fmad=false"]
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*options)
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            raise BadEnvironment(f"NVRTC could not compile {name}: {_log(nvrtc, program)}")
        size = ctypes.c_size_t()
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    for name in _candidates():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _candidates() -> Iterator[str]:
    if torch.version.cuda is None:
        return
    soname = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    yield soname
    for package in ("nvidia", "torch"):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            yield from map(str, sorted(Path(folder).glob(f"**/lib/{soname}")))
            yield from map(str, sorted(Path(folder).glob(f"lib/{soname}")))


def _log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(max(1, size.value))
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.value.decode().strip()


def _check(result: int) -> None:
    if result:
        raise BadEnvironment(f"NVRTC failed with error {result}")
