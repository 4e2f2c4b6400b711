"""Reduction in shared memory, in place: every worker adds its slice of all workers' roots and writes it to all.

# Note [Direct slices in shared memory]
# Buckets lie in shared memory from the start, so nothing is sent. A worker tells its peers that its roots are complete,
# waits for theirs, adds its own slice over all of them in tree order, piece by piece while a piece is in the cache,
# and writes each piece of the sum to every worker's buffer. A second word from everyone ends the reduction. Of a
# slice's elements only its worker reads or writes anything in between: so the sum may go where a root was.
"""

import json
import mmap
import os
from collections.abc import Sequence
from itertools import count

import torch

from lockstep.errors import BadEnvironment
from lockstep.lanes import Branch, Reduction, Root, Tree
from lockstep.wire.algorithms import slices
from lockstep.wire.executor import Executor
from lockstep.wire.neighbours import MAX_FILES, Neighbours

PIECE_BYTES = 256 * 1024
"""How much is added and handed out at a time: what stays in a core's cache."""

DONE = b"done"


class Segment:
    """Shared memory of this worker: a file without a name, until all peers have it, and a tensor over it."""

    def __init__(self, number: int, num_elements: int, dtype: torch.dtype, peers: Sequence[int]) -> None:
        self.number = number
        self.num_bytes = num_elements * dtype.itemsize
        self.file = os.memfd_create("lockstep", os.MFD_CLOEXEC)
        self.unknown_to = set(peers)
        try:
            os.posix_fallocate(self.file, 0, self.num_bytes)  # found out now, not as a bus error later
        except OSError as error:
            os.close(self.file)
            raise BadEnvironment(
                f"{self.num_bytes / 2**20:.0f} MiB of shared memory cannot be had ({error.strerror}). Give the "
                'container or control group more memory, or start with wire="gloo".'
            ) from error
        self.tensor = _mapped(self.file, self.num_bytes).view(dtype)

    def told(self, peer: int) -> None:
        """A peer has the file now; when all have, ours is closed, and only mappings keep the memory."""
        self.unknown_to.discard(peer)
        if not self.unknown_to:
            os.close(self.file)

    def close(self) -> None:
        if self.unknown_to:
            os.close(self.file)
            self.unknown_to.clear()


class SharedMemory:
    """A Reducer for the workers of one host. Tensors that it did not allocate are copied in and out.

    What is not on the CPU, or is spread over hundreds of roots, goes `otherwise`.
    """

    def __init__(self, neighbours: Neighbours, otherwise: Executor, rank: int) -> None:
        self._neighbours = neighbours
        self._otherwise = otherwise
        self._rank = rank
        self._numbers = count()
        self._own: dict[int, Segment] = {}
        self._released: list[int] = []
        self._theirs: dict[tuple[int, int], torch.Tensor] = {}
        self._staging: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._scratch: list[torch.Tensor] = []

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu" or num_elements == 0:
            return torch.empty(num_elements, dtype=dtype, device=device)
        segment = Segment(next(self._numbers), num_elements, dtype, sorted(self._neighbours.sockets))
        self._own[segment.tensor.data_ptr()] = segment
        return segment.tensor

    def release(self, tensor: torch.Tensor) -> None:
        segment = self._own.pop(tensor.data_ptr(), None)
        if segment is not None:
            segment.close()
            self._released.append(segment.number)

    def reduce(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """See Note [Direct slices in shared memory]. Two messages to each peer."""
        too_many = max(reduction.roots_of) >= MAX_FILES  # all roots, and the total, in one message
        if total.device.type != "cpu" or too_many:
            self._otherwise.reduce(reduction, roots, total)
        elif total.numel() > 0:
            self._reduce(reduction, roots, total)

    def close(self) -> None:
        self._neighbours.close()
        for segment in self._own.values():
            segment.close()
        self._own.clear()
        self._theirs.clear()

    def _reduce(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        shared = [self._shared(root, slot, filled=True) for slot, root in enumerate(roots)]
        place = shared[0] if roots and roots[0] is total else self._shared(total, len(roots), filled=False)
        self._announce(shared, place)
        values = {Root(self._rank, index): root for index, root in enumerate(shared)}
        places = [place]
        for peer, (numbers, total_number) in self._hear_all().items():
            values |= {Root(peer, index): self._view(peer, n, total) for index, n in enumerate(numbers)}
            places.append(self._view(peer, total_number, total))
        self._add(reduction.tree, slices(total.numel(), len(reduction.folds))[self._rank], values, places)
        self._tell_all(DONE)
        self._neighbours.receive_all()
        if place.data_ptr() != total.data_ptr():
            total.copy_(place)

    def _add(self, tree: Tree, span: range, values: dict[Root, torch.Tensor], places: list[torch.Tensor]) -> None:
        step = max(1, PIECE_BYTES // places[0].element_size())
        for start in range(span.start, span.stop, step):
            piece = slice(start, min(start + step, span.stop))
            first, *others = (place[piece] for place in places)
            self._sum(tree, piece, values, first)
            for other in others:
                other.copy_(first)

    def _sum(self, tree: Tree, piece: slice, values: dict[Root, torch.Tensor], out: torch.Tensor) -> None:
        """Writes the sum of one piece to `out`, which may be one of the values; partial sums stay in the cache."""

        if isinstance(tree, Branch):
            left, right = self._value(tree.left, 0, piece, values), self._value(tree.right, 1, piece, values)
            torch.add(left, right, out=out)
        elif (only := self._value(tree, 0, piece, values)).data_ptr() != out.data_ptr():
            out.copy_(only)

    def _value(self, tree: Tree, depth: int, piece: slice, values: dict[Root, torch.Tensor]) -> torch.Tensor:
        # A method, not a function inside `_sum`: one that calls itself would keep all values alive until collected.
        if isinstance(tree, Branch):
            left = self._value(tree.left, depth, piece, values)
            right = self._value(tree.right, depth + 1, piece, values)
            return torch.add(left, right, out=self._partial(depth, left))
        assert isinstance(tree, Root)
        return values[tree][piece]

    def _partial(self, depth: int, like: torch.Tensor) -> torch.Tensor:
        while len(self._scratch) <= depth:
            self._scratch.append(torch.empty(PIECE_BYTES, dtype=torch.uint8))
        return self._scratch[depth][: like.nbytes].view(like.dtype)

    # -- who has what ---------------------------------------------------------------------------------------

    def _shared(self, tensor: torch.Tensor, slot: int, *, filled: bool) -> torch.Tensor:
        """The tensor itself if peers can see it, else a copy in shared memory that is kept for the next time."""
        if tensor.data_ptr() in self._own:
            return tensor
        kept = self._staging.get((tensor.dtype, slot))
        if kept is None or kept.numel() < tensor.numel():
            if kept is not None:
                self.release(kept)
            kept = self._staging[tensor.dtype, slot] = self.allocate(tensor.numel(), tensor.dtype, tensor.device)
        staged = kept[: tensor.numel()]
        return staged.copy_(tensor) if filled else staged

    def _announce(self, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Tells every peer which segments hold this worker's roots, and where the sum belongs."""
        segments = [self._own[tensor.data_ptr()] for tensor in (*roots, total)]
        released, self._released = self._released, []
        for peer in self._neighbours.sockets:
            new = {segment.number: segment for segment in segments if peer in segment.unknown_to}
            message = {
                "roots": [segment.number for segment in segments[:-1]],
                "total": segments[-1].number,
                "new": [[segment.number, segment.num_bytes] for segment in new.values()],
                "released": released,
            }
            self._neighbours.send(peer, json.dumps(message).encode(), [segment.file for segment in new.values()])
            for segment in new.values():
                segment.told(peer)

    def _hear_all(self) -> dict[int, tuple[list[int], int]]:
        """What every peer announced: the numbers of its roots, and that of its total. Maps what is new."""
        found = {}
        for peer, (text, files) in self._neighbours.receive_all().items():
            message = json.loads(text)
            for number in message["released"]:
                self._theirs.pop((peer, number), None)
            for (number, num_bytes), file in zip(message["new"], files, strict=True):
                self._theirs[peer, number] = _mapped(file, num_bytes)
                os.close(file)
            found[peer] = (message["roots"], message["total"])
        return found

    def _view(self, peer: int, number: int, like: torch.Tensor) -> torch.Tensor:
        return self._theirs[peer, number][: like.nbytes].view(like.dtype)

    def _tell_all(self, message: bytes) -> None:
        for peer in self._neighbours.sockets:
            self._neighbours.send(peer, message)


def _mapped(file: int, num_bytes: int) -> torch.Tensor:
    """The file's memory as bytes; it stays mapped as long as a tensor looks at it."""
    return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
