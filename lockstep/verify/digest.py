"""SHA-256 over tensors and numbers by name: equal digests mean equal bits."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.state.tensor_file import memory_of

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


def digest(values: Mapping[str, Any]) -> str:
    """One digest over all values, in the order of their names."""
    return combined({name: digest_of(value) for name, value in values.items()})


def combined(digests: Mapping[str, str]) -> str:
    """One digest over the results of `digest_of` for each name."""
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(f"{name}={digests[name]};".encode())
    return whole.hexdigest()


def digest_of(value: Any) -> str:
    """The digest of a tensor (dtype, shape, bits), a plain value, or lists, mappings and dataclasses of them.

    Of any other object only the type counts: its text may hold an address, which differs from run to run.
    """
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().flatten()
        return _sha(f"{flat.dtype} {list(value.shape)}".encode(), memory_of(flat))
    if isinstance(value, _PLAIN):
        return _sha(repr(value).encode())
    if isinstance(value, Mapping):
        return combined({repr(key): digest_of(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return combined({f"{number:09}": digest_of(item) for number, item in enumerate(value)})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return combined({f.name: digest_of(getattr(value, f.name)) for f in dataclasses.fields(value)})
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # a NumPy array or scalar
        return _sha(f"{value.dtype} {value.shape}".encode(), value.tobytes())
    return _sha(type(value).__qualname__.encode())


def _sha(*parts: bytes | memoryview) -> str:
    single = hashlib.sha256()
    for part in parts:
        single.update(part)
    return single.hexdigest()
