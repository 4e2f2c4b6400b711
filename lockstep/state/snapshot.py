"""A snapshot of a run: tensors by name, and everything else as plain JSON. Nothing is pickled, so it cannot run code.

A state_dict is a tree of dicts, lists, tuples, numbers and tensors. `pack` writes the tree as JSON values in which a
tensor is a name; `unpack` is its inverse, for values that `check_packed` accepts.
"""

import ctypes
import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.chance import Generators
from lockstep.errors import BadArgument, BadCheckpoint

Json = Any
Tensors = dict[str, torch.Tensor]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and "q" not in str(dtype)  # quantized tensors are no plain bytes
}
"""The dtypes that are looked up by name."""

DEEPEST = 60
"""How many containers may be nested: the functions here recurse, and Python bounds that."""


@dataclass(frozen=True)
class Snapshot:
    """All that a run resumes from: tensors by name, and everything else as JSON values."""

    tensors: Tensors
    state: dict[str, Json]


def pack(value: Any, path: str, tensors: Tensors, depth: int = 0) -> Json:
    """The JSON form of `value`; its tensors go into `tensors`, named by their paths."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": _put(value.detach(), path, tensors)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy scalar
        return pack(value.item(), path, tensors, depth)
    if depth == DEEPEST:
        raise BadArgument(f"{path} stands in {DEEPEST} containers, and a checkpoint holds no deeper ones")
    if isinstance(value, Mapping):
        items = [(_pack_key(key, path, tensors, depth + 1), f"{path}/{key}", item) for key, item in value.items()]
        return {"dict": [[key, pack(item, at, tensors, depth + 1)] for key, at, item in items]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [pack(item, f"{path}/{number}", tensors, depth + 1) for number, item in enumerate(value)]}
    raise BadArgument(
        f"{path} is a {type(value).__name__}, which is neither saved nor sent: only numbers, strings, tensors (of an "
        "array torch.from_numpy makes one), and dicts, lists and tuples of them"
    )


def unpack(packed: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that `pack` was given."""
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "float":
            return float(content)
        case "dict":
            return {unpack(key, tensors): unpack(value, tensors) for key, value in content}
        case "list":
            return [unpack(item, tensors) for item in content]
    return tuple(unpack(item, tensors) for item in content)


def check_packed(packed: Json, path: str, tensors: Mapping[str, torch.Tensor], depth: int = 0) -> None:
    """Refuses, by the path, what `pack` cannot have made, and the name of a tensor that is not there."""
    if packed is None or isinstance(packed, bool | int | float | str):
        return
    kind, content = next(iter(packed.items())) if isinstance(packed, dict) and len(packed) == 1 else ("", None)
    if kind == "tensor" and isinstance(content, str):
        if content not in tensors:
            raise BadCheckpoint(f"{path} names the tensor {content!r}, which is not there")
    elif kind in ("list", "tuple", "dict") and isinstance(content, list) and depth < DEEPEST:
        for number, item in enumerate(content):
            _check_item(kind, item, f"{path}/{number}", tensors, depth + 1)
    elif kind != "float" or content not in ("nan", "inf", "-inf"):
        raise BadCheckpoint(f"{path} is {reprlib.repr(packed)}, which is no packed value")


def _pack_key(key: Any, path: str, tensors: Tensors, depth: int) -> Json:
    packed = pack(key, f"{path}/{key}.key", tensors, depth)
    if not _can_be_key(packed):
        raise BadArgument(f"{path} has a tensor as a key, and nothing would be found by it once it is loaded")
    return packed


def _put(tensor: torch.Tensor, path: str, tensors: Tensors) -> str:
    """Adds the tensor; returns its name, which need not be its path: two keys may read alike, as 1 and "1" do."""
    while path in tensors:
        path += "'"
    tensors[path] = tensor
    return path


def _check_item(kind: str, item: Json, path: str, tensors: Mapping[str, torch.Tensor], depth: int) -> None:
    if kind != "dict":
        return check_packed(item, path, tensors, depth)
    if not isinstance(item, list) or len(item) != 2:
        raise BadCheckpoint(f"{path} is {reprlib.repr(item)}, which is no key with its value")
    for part in item:
        check_packed(part, path, tensors, depth)
    if not _can_be_key(item[0]):
        raise BadCheckpoint(f"{path} has the key {reprlib.repr(item[0])}, which cannot be one")
    return None


def _can_be_key(packed: Json) -> bool:
    if not isinstance(packed, dict):
        return True
    return not packed.keys() & {"dict", "list", "tensor"} and all(map(_can_be_key, packed.get("tuple", ())))


def forms_of(tensors: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    """The name, dtype and shape of every tensor, as JSON values."""
    return [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as a flat one; a view of it where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def to_bytes(state: Json, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A small state as bytes: the length of a JSON text, the text, and the bytes of all tensors in a row."""
    text = json.dumps({"state": state, "tensors": forms_of(tensors)}).encode()
    flats = [tensor.detach().cpu().contiguous() for tensor in tensors.values()]
    content = (ctypes.string_at(flat.data_ptr(), flat.nbytes) for flat in flats)
    return len(text).to_bytes(8, "little") + text + b"".join(content)


def from_bytes(content: bytes) -> tuple[Json, Tensors]:
    """What `to_bytes` was given, with tensors on the CPU."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    tensors: Tensors = {}
    for name, dtype, shape in header["tensors"]:
        tensors[name] = torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
        size = tensors[name].nbytes
        ctypes.memmove(tensors[name].data_ptr(), content[end : end + size], size)
        end += size
    return header["state"], tensors


def pack_generators(states: Generators, path: str, tensors: Tensors) -> Json:
    """The JSON form of the states; tensors go into `tensors`."""
    numpy = None
    if states.numpy is not None:
        name, keys, *rest = states.numpy
        numpy = [name, [int(key) for key in keys], *rest]
    by_name = {"torch": states.torch_cpu, "cuda": states.torch_cuda, "python": states.python, "numpy": numpy}
    return pack(by_name, path, tensors)


def unpack_generators(packed: Json, tensors: Tensors) -> Generators:
    """The states that `pack_generators` was given. Restoring them leaves the generators alone that are not in use, or
    were not."""
    saved: dict[str, Any] = unpack(packed, tensors)
    numpy = None if saved["numpy"] is None else tuple(saved["numpy"])
    cuda = saved["cuda"] if torch.cuda.is_initialized() else None
    return Generators(saved["torch"], cuda, saved["python"], numpy)
