"""Hands a snapshot from one worker to others over the wire: no file, no pickle.

# Note [How a snapshot travels]
# The size and the SHA-256 of a JSON text; the text (the state, and each tensor's name, dtype and shape); the bytes of
# all tensors one behind the other in pieces; and the SHA-256 of text and bytes. Both sides cut the pieces from the text
# alone, so it is checked before any piece is awaited: a backend may abort when two sides disagree on a size. No dtype
# is looked up that is not listed here, and the snapshot is given out only if the last digest fits.
"""

import ctypes
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import BadCheckpoint
from lockstep.state.checkpoints.file import Snapshot
from lockstep.state.packed import DTYPES
from lockstep.state.schema import check_form
from lockstep.state.tensor_file import memory_of
from lockstep.wire.transport import SNAPSHOT, Pending, Transport

PIECE_BYTES = 64 * 1024 * 1024
TEXT_BYTES_AT_MOST = 1024 * 1024 * 1024
DIGEST_BYTES = 32


@dataclass(frozen=True)
class Form:
    """What a tensor is, without its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Span:
    """Bytes `start` to `stop` of tensor number `tensor`."""

    tensor: int
    start: int
    stop: int


def send_snapshot(
    transport: Transport,
    snapshot: Snapshot,
    targets: Sequence[int],
    tag: int = SNAPSHOT,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Gives `snapshot` to the workers `targets`, each of which calls `receive_snapshot`.

    Costs the snapshot's bytes to each target, and memory for one piece. The snapshot must not change meanwhile.
    """
    text = _text(snapshot, piece_bytes)
    digest = hashlib.sha256(text)
    _wait(_post(transport, _tensor(len(text).to_bytes(8, "little") + digest.digest()), targets, tag))
    _wait(_post(transport, _tensor(text), targets, tag))
    tensors = list(snapshot.tensors.values())
    for spans in pieces([tensor.nbytes for tensor in tensors], piece_bytes):
        piece = torch.cat([_flat(tensors[span.tensor])[span.start : span.stop].cpu() for span in spans])
        on_their_way = _post(transport, piece, targets, tag)
        digest.update(memory_of(piece))
        _wait(on_their_way)
    _wait(_post(transport, _tensor(digest.digest()), targets, tag))


def receive_snapshot(transport: Transport, source: int, tag: int = SNAPSHOT) -> Snapshot:
    """The snapshot that worker `source` sends, on the CPU; BadCheckpoint if it did not arrive as it was sent, or its
    state is not that of a run.
    """
    text = _receive_text(transport, source, tag)
    digest = hashlib.sha256(text)
    state, forms, piece_bytes = _parsed(text, source)
    tensors = {form.name: torch.empty(form.shape, dtype=form.dtype, device="cpu") for form in forms}
    flats = [_flat(tensor) for tensor in tensors.values()]
    for spans in pieces([form.nbytes for form in forms], piece_bytes):
        piece = torch.empty(sum(span.stop - span.start for span in spans), dtype=torch.uint8, device="cpu")
        transport.receive(piece, source, tag).wait()
        digest.update(memory_of(piece))
        for span, part in zip(spans, piece.split([span.stop - span.start for span in spans]), strict=True):
            flats[span.tensor][span.start : span.stop] = part
    if _receive(transport, DIGEST_BYTES, source, tag) != digest.digest():
        raise BadCheckpoint(_damaged(source))
    snapshot = Snapshot(tensors, state)
    check_form(snapshot, f"the snapshot from worker {source}")
    return snapshot


def pieces(sizes_bytes: Sequence[int], piece_bytes: int) -> Iterator[list[Span]]:
    """The tensors' bytes, one behind the other, cut into pieces of `piece_bytes`; the last may be shorter."""
    piece: list[Span] = []
    room = piece_bytes
    for tensor, size in enumerate(sizes_bytes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            piece.append(Span(tensor, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield piece
                piece, room = [], piece_bytes
    if piece:
        yield piece


def _text(snapshot: Snapshot, piece_bytes: int) -> bytes:
    forms = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in snapshot.tensors.items()
    ]
    return json.dumps({"piece_bytes": piece_bytes, "state": snapshot.state, "tensors": forms}).encode()


def _receive_text(transport: Transport, source: int, tag: int) -> bytes:
    head = _receive(transport, 8 + DIGEST_BYTES, source, tag)
    size = int.from_bytes(head[:8], "little")
    if not 0 < size <= TEXT_BYTES_AT_MOST:
        raise BadCheckpoint(f"worker {source} announced a snapshot with a text of {size} bytes: it cannot be one")
    text = _receive(transport, size, source, tag)
    if hashlib.sha256(text).digest() != head[8:]:
        raise BadCheckpoint(_damaged(source))
    return text


def _damaged(source: int) -> str:
    return f"the snapshot from worker {source} was damaged on its way: its SHA-256 does not fit"


def _parsed(text: bytes, source: int) -> tuple[dict[str, Any], list[Form], int]:
    try:
        told = json.loads(text)
        forms = [Form(str(name), DTYPES[dtype], _shape(shape)) for name, dtype, shape in told["tensors"]]
        state, piece_bytes = told["state"], told["piece_bytes"]
        if not isinstance(state, dict) or type(piece_bytes) is not int or not 0 < piece_bytes <= PIECE_BYTES:
            raise ValueError(f"a {type(state).__name__} in pieces of {piece_bytes!r} bytes")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadCheckpoint(f"worker {source} sent a snapshot that cannot be read: {error!r}") from error
    return state, forms, piece_bytes


def _shape(sizes: Any) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"no shape: {sizes}")
    return tuple(sizes)


def _post(transport: Transport, flat: torch.Tensor, targets: Sequence[int], tag: int) -> list[Pending]:
    return [transport.send(flat, target, tag) for target in targets]


def _wait(on_their_way: list[Pending]) -> None:
    for pending in on_their_way:
        pending.wait()


def _receive(transport: Transport, num_bytes: int, source: int, tag: int) -> bytes:
    place = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    transport.receive(place, source, tag).wait()
    return ctypes.string_at(place.data_ptr(), num_bytes)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor; a view of it where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
