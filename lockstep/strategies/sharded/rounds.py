"""Parameters of which each worker has a copy of its own: gathered from those who have updated them, and compared.

# Note [Rounds through a small buffer]
# Parameters are many tensors, and a collective takes one flat one. So they pass through a buffer, as many bytes of each
# owner's chunks in each round as there is room for: packed, gathered, unpacked. The buffer is small against the
# parameters, and a round is large against the cost of a collective.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch

from lockstep.strategies.sharded.once import flat
from lockstep.strategies.sharded.plan import UpdateChunk
from lockstep.wire import Wire

BUFFER_BYTES, FEWEST_ROUNDS, SMALL_BYTES = 64 << 20, 4, 1 << 20
"""The buffer is no larger than this, nor than one part in so many of the parameters, unless they are small."""
ALIGN_BYTES = 16
ROWS = 256
"""Into how many parts the buffer is cut for a fingerprint."""
UNIT_BYTES = 8 * ROWS


@dataclass
class Round:
    """What is in the buffer at one time: `slices[m]` are the bytes of member m, `views[m]` parts of its chunks."""

    slices: list[range] = field(default_factory=list)
    views: list[list[torch.Tensor]] = field(default_factory=list)
    places: list[list[torch.Tensor]] = field(default_factory=list)
    """Where each of the views stands in the buffer."""

    def copy(self, members: Sequence[int], *, out: bool) -> None:
        """The parameters of these members into the buffer, or `out` of it."""
        views = [view for member in members for view in self.views[member]]
        places = [place for member in members for place in self.places[member]]
        if views:
            torch._foreach_copy_(*((views, places) if out else (places, views)))


class ParameterRounds:
    """All chunks of an optimizer's parameters, by the worker that owns them. Its owner calls `close`.

    `chunks[m]` belong to member m of this worker's host.
    """

    def __init__(
        self, wire: Wire, own: int, parameters: Sequence[torch.Tensor], chunks: Sequence[Sequence[UpdateChunk]]
    ) -> None:
        self._wire, self._own, self._members = wire, own, range(len(chunks))
        most_bytes = buffer_bytes(sum(map(_room, parameters)))
        self._buffer = wire.reducer.allocate(most_bytes, torch.uint8, parameters[0].device)
        whole = [UpdateChunk(number, 0, parameter.numel()) for number, parameter in enumerate(parameters)]
        self._by_owner = self._made([_pieces(parameters, owned, most_bytes // len(chunks)) for owned in chunks])
        self._in_order = self._made([_pieces(parameters, whole, most_bytes)])
        self._weights = torch.arange(1, 2 * ROWS, 2, device=parameters[0].device)

    def _made(self, pieces: Sequence[Sequence[list[torch.Tensor]]]) -> list[Round]:
        """Rounds of the pieces of each member."""
        return [self._round(pieces_now) for pieces_now in zip_longest(*pieces, fillvalue=list[torch.Tensor]())]

    def _round(self, pieces: Sequence[list[torch.Tensor]]) -> Round:
        found, end = Round(), 0
        for views in pieces:
            begin, places = end, []
            for view in views:
                places.append(self._buffer[end : end + view.nbytes].view(view.dtype))
                end += _room(view)
            found.slices.append(range(begin, end))
            found.views.append(views)
            found.places.append(places)
        return found

    def gather(self) -> None:
        """Collective, where all workers are on one host. Every worker's parameters are as their owners have them.

        Returns when this worker's GPU is done. Raises PeerGone if a worker is lost: the parameters are undefined then.
        """
        for one in self._by_owner:
            self._gather(one)
        self._wire.reducer.synchronize()

    def _gather(self, one: Round) -> None:
        one.copy([self._own], out=False)
        self._wire.reducer.all_gather(self._buffer[: one.slices[-1].stop], one.slices)
        one.copy([member for member in self._members if member != self._own], out=True)

    def fingerprint(self) -> bytes:
        """Of this worker's parameters, whoever owns them: another one if any word of 64 bits is.

        See Note [Every flipped bit shows] in gradients/fingerprint.py.
        """
        total = torch.zeros_like(self._weights)
        for one in self._in_order:
            self._buffer.zero_()
            one.copy([0], out=False)
            total = total * 3 + self._buffer.view(torch.int64).view(ROWS, -1).sum(1)
        return int((total * self._weights).sum().item()).to_bytes(8, "little", signed=True)

    def views(self) -> Iterator[torch.Tensor]:
        for one in (*self._by_owner, *self._in_order):
            for views in one.views:
                yield from views

    def close(self) -> None:
        self._wire.reducer.release(self._buffer)


def buffer_bytes(parameter_bytes: int) -> int:
    """How large the buffer for so many bytes of parameters is: the same on all hosts."""
    return min(BUFFER_BYTES, max(SMALL_BYTES, parameter_bytes // FEWEST_ROUNDS)) // UNIT_BYTES * UNIT_BYTES


def _pieces(
    parameters: Sequence[torch.Tensor], chunks: Sequence[UpdateChunk], most_bytes: int
) -> list[list[torch.Tensor]]:
    """Views of the chunks, in the order of memory, those of each round together."""
    rounds: list[list[torch.Tensor]] = []
    room = 0
    for chunk in chunks:
        whole = flat(parameters[chunk.parameter].detach())
        start = chunk.start
        while start < chunk.stop:
            if room < ALIGN_BYTES:
                rounds.append([])
                room = most_bytes // ALIGN_BYTES * ALIGN_BYTES
            view = whole[start : min(chunk.stop, start + room // whole.itemsize)]
            rounds[-1].append(view)
            room -= _room(view)
            start += view.numel()
    return rounds


def _room(view: torch.Tensor) -> int:
    return -(-view.nbytes // ALIGN_BYTES) * ALIGN_BYTES
