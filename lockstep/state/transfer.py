"""Sends a snapshot from one worker to others over the wire: no file, no pickle.

# Note [How a snapshot travels]
# The size and the SHA-256 of a JSON text; the text (the state, and each tensor's name, dtype and shape); the bytes of
# all tensors in a row, cut into pieces; and the SHA-256 of text and bytes. Both sides cut the pieces by the text alone,
# so it is checked before any piece is received: a backend may abort when two sides disagree on a size. Only listed
# dtypes are looked up, and the snapshot is returned only if the last digest fits.
"""

import ctypes
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from lockstep.errors import BadCheckpoint
from lockstep.state.schema import check_form
from lockstep.state.snapshot import DTYPES, Snapshot, bytes_of, forms_of
from lockstep.state.tensor_file import memory_of
from lockstep.wire.transport import SNAPSHOT, Transport

PIECE_BYTES = 64 * 1024 * 1024
TEXT_BYTES_AT_MOST = 1024 * 1024 * 1024
DIGEST_BYTES = 32


class Span(NamedTuple):
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
    """Sends `snapshot` to the workers `targets`, each of which calls `receive_snapshot`.

    Costs the snapshot's bytes to each target, and memory for one piece. The snapshot must not change meanwhile.
    """

    def send(flat: torch.Tensor, digest: Any = None) -> None:
        pending = [transport.send(flat, target, tag) for target in targets]
        if digest is not None:
            digest.update(memory_of(flat))  # while the bytes are being sent
        for sent in pending:
            sent.wait()

    content = {"piece_bytes": piece_bytes, "state": snapshot.state, "tensors": forms_of(snapshot.tensors)}
    text = json.dumps(content).encode()
    digest = hashlib.sha256(text)
    send(_tensor(len(text).to_bytes(8, "little") + digest.digest()))
    send(_tensor(text))
    tensors = list(snapshot.tensors.values())
    for spans in pieces([tensor.nbytes for tensor in tensors], piece_bytes):
        send(torch.cat([bytes_of(tensors[span.tensor])[span.start : span.stop].cpu() for span in spans]), digest)
    send(_tensor(digest.digest()))


def receive_snapshot(transport: Transport, source: int, tag: int = SNAPSHOT) -> Snapshot:
    """The snapshot that worker `source` sends, on the CPU.

    Raises BadCheckpoint if it did not arrive as it was sent, or its state is not that of a run.
    """
    text = _receive_text(transport, source, tag)
    digest = hashlib.sha256(text)
    snapshot, piece_bytes = _parsed(text, source)
    flats = [bytes_of(tensor) for tensor in snapshot.tensors.values()]
    for spans in pieces([flat.nbytes for flat in flats], piece_bytes):
        sizes = [span.stop - span.start for span in spans]
        piece = _received(transport, sum(sizes), source, tag)
        digest.update(memory_of(piece))
        for span, part in zip(spans, piece.split(sizes), strict=True):
            flats[span.tensor][span.start : span.stop] = part
    if _bytes(_received(transport, DIGEST_BYTES, source, tag)) != digest.digest():
        raise BadCheckpoint(_damaged(source))
    check_form(snapshot, f"the snapshot from worker {source}")
    return snapshot


def pieces(sizes_bytes: Sequence[int], piece_bytes: int) -> Iterator[list[Span]]:
    """The tensors' bytes in a row, cut into pieces of `piece_bytes`; the last may be shorter."""
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


def _receive_text(transport: Transport, source: int, tag: int) -> bytes:
    head = _bytes(_received(transport, 8 + DIGEST_BYTES, source, tag))
    size = int.from_bytes(head[:8], "little")
    if not 0 < size <= TEXT_BYTES_AT_MOST:
        raise BadCheckpoint(f"worker {source} announced a snapshot with a text of {size} bytes: it cannot be one")
    text = _bytes(_received(transport, size, source, tag))
    if hashlib.sha256(text).digest() != head[8:]:
        raise BadCheckpoint(_damaged(source))
    return text


def _damaged(source: int) -> str:
    return f"the snapshot from worker {source} was damaged on its way: its SHA-256 does not fit"


def _parsed(text: bytes, source: int) -> tuple[Snapshot, int]:
    """The snapshot with tensors still to be filled, and the size of the pieces in which their bytes come."""
    try:
        content = json.loads(text)
        forms = [(str(name), DTYPES[dtype], _shape(shape)) for name, dtype, shape in content["tensors"]]
        state, piece_bytes = content["state"], content["piece_bytes"]
        if not isinstance(state, dict) or type(piece_bytes) is not int or not 0 < piece_bytes <= PIECE_BYTES:
            raise ValueError(f"a {type(state).__name__} in pieces of {piece_bytes!r} bytes")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadCheckpoint(f"worker {source} sent a snapshot that cannot be read: {error!r}") from error
    tensors = {name: torch.empty(shape, dtype=dtype, device="cpu") for name, dtype, shape in forms}
    return Snapshot(tensors, state), piece_bytes


def _shape(sizes: Any) -> list[int]:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"no shape: {sizes}")
    return list(sizes)


def _received(transport: Transport, num_bytes: int, source: int, tag: int) -> torch.Tensor:
    place = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    transport.receive(place, source, tag).wait()
    return place


def _bytes(flat: torch.Tensor) -> bytes:
    return ctypes.string_at(flat.data_ptr(), flat.nbytes)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
