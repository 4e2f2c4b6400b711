"""Digests of what a batch holds: equal on two workers that hold the same batch."""

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lockstep.data.structure import opened

SAMPLED_ROWS, SAMPLED_COLUMNS = 16, 256
"""How much of each tensor is sampled where reading all of it would cost too much."""

Look = Callable[[Any], bytes]


def contents(whole: Any) -> str:
    """A short digest of a batch that this worker holds whole."""
    return _digest(whole, all_bytes)


def sampled_contents(whole: Any) -> str:
    """The same of some rows and columns of each tensor; of one on a GPU, for which the host would wait, its form."""
    return _digest(whole, _some)


def _digest(whole: Any, look: Look) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for piece in _pieces(whole, look):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(part: Any, look: Look) -> Iterator[bytes]:
    structure = opened(part)
    if structure is not None:
        for name, inner in structure.parts:
            yield name.encode()
            yield from _pieces(inner, look)
    elif isinstance(part, torch.Tensor) or hasattr(part, "tobytes"):
        yield f"{part.dtype} {list(part.shape)}".encode()
        yield look(part)
    else:
        yield repr(part).encode()


def all_bytes(part: Any) -> bytes:
    """Those of a tensor in plain memory, or of an array."""
    if not isinstance(part, torch.Tensor):
        return bytes(part.tobytes())
    whole = part.detach().cpu().contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes)


def _some(part: Any) -> bytes:
    if isinstance(part, torch.Tensor) and part.device.type != "cpu":
        return b""
    if part.ndim == 0 or 0 in part.shape:
        return all_bytes(part)
    rows = part[:: max(1, len(part) // SAMPLED_ROWS)]
    table = rows.reshape(len(rows), -1)
    return all_bytes(table[:, :: max(1, table.shape[1] // SAMPLED_COLUMNS)])
