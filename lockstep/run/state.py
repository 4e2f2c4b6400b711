"""State as plain JSON plus tensors by name: nothing is pickled, nothing in a file can run.

A state_dict is a tree of dicts, lists, tuples, numbers and tensors. `pack` writes the tree as JSON values in which a
tensor is a name; `unpack` is its inverse.
"""

import ctypes
import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.errors import BadArgument, BadCheckpoint

Json = Any
Tensors = dict[str, torch.Tensor]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and "q" not in str(dtype)  # quantized tensors are no plain bytes
}
"""The dtypes that are looked up by name."""


def pack(value: Any, path: str, tensors: Tensors) -> Json:
    """The JSON form of `value`; its tensors go into `tensors`, named by where they stand."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Mapping):
        return {"dict": [[pack(k, f"{path}.key", tensors), _entry(v, path, k, tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [pack(item, f"{path}/{number}", tensors) for number, item in enumerate(value)]}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy scalar
        return pack(value.item(), path, tensors)
    raise BadArgument(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold: only numbers, strings, tensors, and "
        "dicts, lists and tuples of them"
    )


def unpack(packed: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that `pack` was given."""
    if not isinstance(packed, dict):
        return packed
    (kind, content), *more = packed.items()
    if more:
        raise BadCheckpoint(f"a checkpoint's state has an entry of unknown form: {sorted(packed)}")
    match kind:
        case "tensor":
            return tensors[content]
        case "float":
            return float(content)
        case "dict":
            return {unpack(key, tensors): unpack(value, tensors) for key, value in content}
        case "list":
            return [unpack(item, tensors) for item in content]
        case "tuple":
            return tuple(unpack(item, tensors) for item in content)
    raise BadCheckpoint(f"a checkpoint's state has an entry of unknown kind {kind!r}")


def _entry(value: Any, path: str, key: Any, tensors: Tensors) -> Json:
    return pack(value, f"{path}/{key}", tensors)


def to_bytes(state: Json, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A small state as bytes: the length of a text, the text, and the bytes of all tensors one behind the other."""
    forms = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]
    text = json.dumps({"state": state, "tensors": forms}).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(map(_bytes, tensors.values()))


def from_bytes(content: bytes) -> tuple[Json, Tensors]:
    """What `to_bytes` was given, with tensors on the CPU."""
    end = 8 + int.from_bytes(content[:8], "little")
    told = json.loads(content[8:end])
    tensors: Tensors = {}
    for name, dtype, shape in told["tensors"]:
        tensors[name] = torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
        size = tensors[name].nbytes
        ctypes.memmove(tensors[name].data_ptr(), content[end : end + size], size)
        end += size
    return told["state"], tensors


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes)
