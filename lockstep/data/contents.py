"""Whether two workers hold the same batch, told by a digest of what is in it."""

import ctypes
import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from lockstep.data.batch import GlobalBatch
from lockstep.data.cut import opened


def contents(batch: GlobalBatch, num_lanes: int) -> str:
    """A short digest of all shares of a batch that this worker holds whole."""
    shares = batch.for_lanes(range(num_lanes)).shares
    digest = hashlib.blake2b(digest_size=8)
    for lane in sorted(shares):
        for piece in _pieces(shares[lane]):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(part: Any) -> Iterator[bytes]:
    structure = opened(part)
    if structure is not None:
        for name, inner in structure.parts:
            yield name.encode()
            yield from _pieces(inner)
    elif isinstance(part, torch.Tensor):
        yield f"{part.dtype} {list(part.shape)}".encode()
        whole = part.detach().cpu().contiguous()
        yield ctypes.string_at(whole.data_ptr(), whole.nbytes)
    else:
        yield part.tobytes() if hasattr(part, "tobytes") else repr(part).encode()
