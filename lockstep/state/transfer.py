"""Sends a snapshot from one worker, or several, to others over the wire: no file, no pickle.

# Note [How a snapshot travels]
# The size and the SHA-256 of a JSON text; the text (the state, each tensor's name, dtype and shape, and who sends); the
# bytes of all tensors in a row, cut into pieces; and the SHA-256 of each piece, and of all before. Both sides cut the
# pieces by the text alone, so it is checked before any piece is received: a backend may abort when two sides disagree
# on a size. Only listed dtypes are looked up, and the snapshot is returned only if all digests fit.

# Note [Several senders]
# Members of a run have the same state, so the source of a snapshot has helpers: the senders take the pieces in turn.
# What counts is the source's state alone. A target compares every piece with the source's digest, and the source sends
# those again in which a helper differs: one that has drifted, or has no such tensor and sends zeros in its place.
"""

import ctypes
import hashlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
MOST_SENDERS = 8
"""How many pieces a target receives at the same time."""


class Span(NamedTuple):
    """Bytes `start` to `stop` of tensor number `tensor`."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Content:
    """What the text of a snapshot says: `senders` are ranks, the source's first."""

    state: dict[str, Any]
    forms: list[tuple[str, torch.dtype, list[int]]]
    piece_bytes: int
    senders: list[int]
    targets: list[int]

    @property
    def pieces(self) -> list[list[Span]]:
        sizes = [torch.empty(shape, dtype=dtype, device="meta").nbytes for _, dtype, shape in self.forms]
        return list(pieces(sizes, self.piece_bytes))

    def sender_of(self, piece: int) -> int:
        """See Note [Several senders]."""
        return self.senders[piece % len(self.senders)]


def helpers_of(source: int, members: Sequence[int]) -> list[int]:
    """Which of the `members`, all of whom have the state, help the source to send it: some, spread over all ranks."""
    others = [rank for rank in members if rank != source]
    return others[:: -(-len(others) // (MOST_SENDERS - 1)) or 1]


def send_snapshot(
    transport: Transport,
    snapshot: Snapshot,
    targets: Sequence[int],
    tag: int = SNAPSHOT,
    piece_bytes: int = PIECE_BYTES,
    helpers: Sequence[int] = (),
) -> None:
    """Sends `snapshot` to the workers `targets`, each of which calls `receive_snapshot`; `helpers` call `help_to_send`.

    Costs this worker's part of the snapshot's bytes to each target, and memory for one piece. The snapshot must not
    change meanwhile.
    """
    who = {"senders": [transport.world.rank, *helpers], "targets": [*targets]}
    forms = {"piece_bytes": piece_bytes, "state": snapshot.state, "tensors": forms_of(snapshot.tensors)}
    text = json.dumps({**forms, **who}).encode()
    head = len(text).to_bytes(8, "little") + hashlib.sha256(text).digest()
    for message in (head, text):
        _send(transport, _tensor(message), [*helpers, *targets], tag)
    content, flats = _parsed(text, transport.world.rank), _flats(snapshot)
    digests = b""
    for number, spans in enumerate(content.pieces):
        piece = _joined(flats, spans)
        own = content.sender_of(number) == transport.world.rank
        pending = [transport.send(piece, target, tag) for target in targets if own]
        digests += hashlib.sha256(memory_of(piece)).digest()  # while the bytes are being sent
        for sent in pending:
            sent.wait()
    _send(transport, _tensor(digests + hashlib.sha256(text + digests).digest()), targets, tag)
    for target in targets if helpers else ():
        asked = _bytes(_received(transport, 1 + len(content.pieces), target, tag))
        for number, spans in enumerate(content.pieces):
            if asked[number]:
                _send(transport, _joined(flats, spans), [target], tag)


def help_to_send(transport: Transport, snapshot: Snapshot, source: int, tag: int = SNAPSHOT) -> None:
    """Sends some pieces of the snapshot that worker `source` sends. See Note [Several senders]."""
    content, flats = _parsed(_receive_text(transport, source, tag), source), []
    for name, dtype, shape in content.forms:
        own = snapshot.tensors.get(name)
        has_it = own is not None and (own.dtype, list(own.shape)) == (dtype, shape)
        flats.append(bytes_of(own if own is not None and has_it else torch.zeros(shape, dtype=dtype, device="cpu")))
    for number, spans in enumerate(content.pieces):
        if content.sender_of(number) == transport.world.rank:
            _send(transport, _joined(flats, spans), content.targets, tag)


def receive_snapshot(transport: Transport, source: int, tag: int = SNAPSHOT) -> Snapshot:
    """The snapshot that worker `source` sends, on the CPU.

    Raises BadCheckpoint if it did not arrive as it was sent, or its state is not that of a run.
    """
    text = _receive_text(transport, source, tag)
    content = _parsed(text, source)
    tensors = {name: torch.empty(shape, dtype=dtype, device="cpu") for name, dtype, shape in content.forms}
    snapshot = Snapshot(tensors, content.state)
    flats, cut = _flats(snapshot), content.pieces
    found = []
    for spans, piece in zip(cut, _arriving(transport, content, tag), strict=True):
        found.append(hashlib.sha256(memory_of(piece)).digest())
        _take(flats, spans, piece)
    given = _receive_digests(transport, text, len(cut), source, tag)
    different = [number for number in range(len(cut)) if found[number] != given[number]]
    if any(content.sender_of(number) == source for number in different):
        raise BadCheckpoint(_damaged(source))
    if len(content.senders) > 1:
        asked = bytes(number in different for number in range(len(cut) + 1))
        _send(transport, _tensor(asked), [source], tag)
    for number in different:
        piece = _received(transport, _num_bytes(cut[number]), source, tag)
        if hashlib.sha256(memory_of(piece)).digest() != given[number]:
            raise BadCheckpoint(_damaged(source))
        _take(flats, cut[number], piece)
    check_form(snapshot, f"the snapshot from worker {source}")
    return snapshot


def _arriving(transport: Transport, content: Content, tag: int) -> Iterator[torch.Tensor]:
    """The pieces in order; as many are under way as there are senders."""
    under_way: deque[tuple[torch.Tensor, Any]] = deque()
    for number, spans in enumerate(content.pieces):
        place = torch.empty(_num_bytes(spans), dtype=torch.uint8, device="cpu")
        under_way.append((place, transport.receive(place, content.sender_of(number), tag)))
        if len(under_way) == len(content.senders):
            yield _waited_for(*under_way.popleft())
    while under_way:
        yield _waited_for(*under_way.popleft())


def _waited_for(place: torch.Tensor, pending: Any) -> torch.Tensor:
    pending.wait()
    return place


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


def _flats(snapshot: Snapshot) -> list[torch.Tensor]:
    return [bytes_of(tensor) for tensor in snapshot.tensors.values()]


def _joined(flats: Sequence[torch.Tensor], spans: Sequence[Span]) -> torch.Tensor:
    return torch.cat([flats[span.tensor][span.start : span.stop].cpu() for span in spans])


def _take(flats: Sequence[torch.Tensor], spans: Sequence[Span], piece: torch.Tensor) -> None:
    for span, part in zip(spans, piece.split([span.stop - span.start for span in spans]), strict=True):
        flats[span.tensor][span.start : span.stop] = part


def _num_bytes(spans: Sequence[Span]) -> int:
    return sum(span.stop - span.start for span in spans)


def _receive_text(transport: Transport, source: int, tag: int) -> bytes:
    head = _bytes(_received(transport, 8 + DIGEST_BYTES, source, tag))
    size = int.from_bytes(head[:8], "little")
    if not 0 < size <= TEXT_BYTES_AT_MOST:
        raise BadCheckpoint(f"worker {source} announced a snapshot with a text of {size} bytes: it cannot be one")
    text = _bytes(_received(transport, size, source, tag))
    if hashlib.sha256(text).digest() != head[8:]:
        raise BadCheckpoint(_damaged(source))
    return text


def _receive_digests(transport: Transport, text: bytes, number: int, source: int, tag: int) -> list[bytes]:
    message = _bytes(_received(transport, (number + 1) * DIGEST_BYTES, source, tag))
    *given, last = (message[start : start + DIGEST_BYTES] for start in range(0, len(message), DIGEST_BYTES))
    if hashlib.sha256(text + b"".join(given)).digest() != last:
        raise BadCheckpoint(_damaged(source))
    return given


def _damaged(source: int) -> str:
    return f"the snapshot from worker {source} was damaged on its way: its SHA-256 does not fit"


def _parsed(text: bytes, source: int) -> Content:
    try:
        content = json.loads(text)
        forms = [(str(name), DTYPES[dtype], _numbers(shape)) for name, dtype, shape in content["tensors"]]
        state, piece_bytes = content["state"], content["piece_bytes"]
        if not isinstance(state, dict) or type(piece_bytes) is not int or not 0 < piece_bytes <= PIECE_BYTES:
            raise ValueError(f"a {type(state).__name__} in pieces of {piece_bytes!r} bytes")
        senders, targets = _numbers(content["senders"]), _numbers(content["targets"])
        if senders[:1] != [source]:
            raise ValueError(f"it comes from {senders}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadCheckpoint(f"worker {source} sent a snapshot that cannot be read: {error!r}") from error
    return Content(state, forms, piece_bytes, senders, targets)


def _numbers(sizes: Any) -> list[int]:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"no shape and no ranks: {sizes}")
    return list(sizes)


def _send(transport: Transport, flat: torch.Tensor, targets: Sequence[int], tag: int) -> None:
    for sent in [transport.send(flat, target, tag) for target in targets]:
        sent.wait()


def _received(transport: Transport, num_bytes: int, source: int, tag: int) -> torch.Tensor:
    place = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    transport.receive(place, source, tag).wait()
    return place


def _bytes(flat: torch.Tensor) -> bytes:
    return ctypes.string_at(flat.data_ptr(), flat.nbytes)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
