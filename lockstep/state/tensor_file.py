"""Writes tensors to a file of the safetensors format, with torch alone.

The format: eight bytes with the length of the header; the header, which is JSON and has the dtype, the shape and the
place of every tensor by name; and the bytes of the tensors. The safetensors library reads such a file without NumPy,
but cannot write one without it.

# Note [Aligned tensors]
# A reader may map the file into memory and use the tensors in place. So spaces fill the header up to a multiple
# of eight bytes, and larger elements come first: every tensor begins at a multiple of the size of its elements.
"""

import ctypes
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from lockstep.errors import BadArgument

HALVES = torch.float4_e2m1fn_x2
"""Two numbers in an element; the file counts the numbers."""
NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.bool: "BOOL",
        torch.uint8: "U8",
        torch.int8: "I8",
        torch.uint16: "U16",
        torch.int16: "I16",
        torch.uint32: "U32",
        torch.int32: "I32",
        torch.uint64: "U64",
        torch.int64: "I64",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float32: "F32",
        torch.float64: "F64",
        torch.complex64: "C64",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
        torch.float8_e5m2: "F8_E5M2",
        torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
        torch.float8_e8m0fnu: "F8_E8M0",
        HALVES: "F4",
    }
)
"""The format's name of each dtype that it has."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Writes the tensors to a new file at `path`; returns the SHA-256 of the file.

    A tensor is copied only if it is on a GPU or not contiguous, and one at a time.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-_checked(*item).dtype.itemsize, item[0]))
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in _pieces(ordered):
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy: valid as long as the tensor."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def _pieces(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[bytes | memoryview]:
    yield _header(tensors)
    for _, tensor in tensors:
        # torch evaluates conjugates and negatives lazily: the memory of such a tensor does not hold its values.
        there = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
        yield memory_of(there)


def _header(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """See Note [Aligned tensors]."""
    places = pairwise(accumulate((tensor.nbytes for _, tensor in tensors), initial=0))
    entries = {name: _entry(tensor, place) for (name, tensor), place in zip(tensors, places, strict=True)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _entry(tensor: torch.Tensor, place: tuple[int, int]) -> dict[str, Any]:
    shape = list(tensor.shape)
    if tensor.dtype is HALVES:
        shape[-1:] = [2 * size for size in shape[-1:]]
    return {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": place}


def _checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if the format can hold it."""
    if tensor.layout is not torch.strided:
        raise BadArgument(
            f"{name} is a {_plain(tensor.layout)} tensor, which a checkpoint cannot hold: use a dense one"
        )
    if tensor.dtype not in NAMES:
        instead = "complex64, or two real tensors" if tensor.is_complex() else "another dtype"
        raise BadArgument(f"{name} is of dtype {_plain(tensor.dtype)}, which a checkpoint cannot hold: use {instead}")
    return tensor


def _plain(name: object) -> str:
    return str(name).removeprefix("torch.")
