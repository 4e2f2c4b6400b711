"""Which worker of a host updates which elements: a pure plan, the same on all workers.

# Note [Cuts that no kernel notices]
# A kernel takes elements in vectors, and what is left at the end of a tensor one by one; the two may round
# differently. A cut at a multiple of GRANULE elements falls between two vectors, whatever their width, so the elements
# before and after it are taken as they would be in the whole tensor. Several threads cut a tensor once more, at places
# that depend on its length: then no tensor is cut.

# Note [Empty chunks]
# An elementwise optimizer keeps a few numbers for each parameter that do not depend on its elements, such as `step`.
# So every worker has a chunk of every parameter, perhaps an empty one: its update advances these numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GRANULE = 1024
"""See Note [Cuts that no kernel notices]."""

BATCH_ELEMENTS = 256 * GRANULE
"""How many elements are journaled and updated together, if no whole tensor is larger."""

KERNEL_ELEMENTS = 64 * GRANULE
"""The same where one kernel updates them: they and their journal fit into a core's cache. See fused.py."""


@dataclass(frozen=True)
class UpdateChunk:
    """Elements `start` to `stop` of a parameter, in the order of memory. `parameter` counts those of the optimizer."""

    parameter: int
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


Batch = tuple[UpdateChunk, ...]
"""Chunks that one call of the optimizer updates. Only the last batch of a worker may have empty ones."""


@dataclass(frozen=True)
class Batching:
    """What stands in one batch: up to `most_elements`, if no whole tensor is larger, and tensors of one kind.

    `kinds` has a number for each parameter; without any they are all alike.
    """

    most_elements: int = 0
    kinds: Sequence[int] = ()

    @property
    def most(self) -> int:
        return self.most_elements or BATCH_ELEMENTS

    def kind(self, chunk: UpdateChunk) -> int:
        return self.kinds[chunk.parameter] if self.kinds else 0


ALIKE = Batching()


def cut(sizes: Sequence[int], num_workers: int, batching: Batching = ALIKE) -> list[list[Batch]]:
    """The batches of each worker where updates are elementwise: equal parts, up to GRANULE elements."""
    total = sum(sizes)
    bounds = [total * worker // num_workers for worker in range(num_workers + 1)]
    chunks: list[list[UpdateChunk]] = [[] for _ in range(num_workers)]
    begin = 0
    for parameter, size in enumerate(sizes):
        cuts = [_granules(bound - begin, size) for bound in bounds]
        for worker, (start, stop) in enumerate(zip(cuts, [*cuts[1:-1], size], strict=False)):
            chunks[worker].append(UpdateChunk(parameter, start, max(start, stop)))
        begin += size
    return [_batches(_pieces(own, batching.most), batching) for own in chunks]


def whole(
    sizes: Sequence[int], num_workers: int, batching: Batching = ALIKE, *, with_empty: bool = False
) -> list[list[Batch]]:
    """The batches of each worker where no tensor is cut: large ones first, each to the worker that has least so far.

    `with_empty`: every worker has a chunk of every tensor. See Note [Empty chunks].
    """
    owned: list[list[UpdateChunk]] = [[] for _ in range(num_workers)]
    held = [0] * num_workers
    for parameter in sorted(range(len(sizes)), key=lambda one: (-sizes[one], one)):
        worker = held.index(min(held))
        held[worker] += sizes[parameter]
        for other in range(num_workers):
            if other == worker or with_empty:
                owned[other].append(UpdateChunk(parameter, 0, sizes[parameter] if other == worker else 0))
    return [_batches(sorted(own, key=lambda chunk: chunk.parameter), batching) for own in owned]


def _granules(position: int, size: int) -> int:
    """The nearest place inside of a tensor, at or before the position, where it may be cut."""
    return size if position >= size else max(0, position) // GRANULE * GRANULE


def _pieces(chunks: Sequence[UpdateChunk], most_elements: int) -> list[UpdateChunk]:
    """No chunk is larger than a batch."""
    return [
        UpdateChunk(chunk.parameter, start, min(start + most_elements, chunk.stop))
        for chunk in chunks
        for start in (range(chunk.start, chunk.stop, most_elements) if chunk.num_elements else [chunk.start])
    ]


def _batches(chunks: Sequence[UpdateChunk], batching: Batching) -> list[Batch]:
    batches: list[list[UpdateChunk]] = []
    room = -1
    for chunk in sorted(chunks, key=lambda one: one.num_elements == 0):  # the empty ones last
        is_other = bool(batches) and batching.kind(batches[-1][-1]) != batching.kind(chunk)
        if not batches or (chunk.num_elements and (chunk.num_elements > room or is_other)):
            batches.append([])
            room = batching.most
        batches[-1].append(chunk)
        room -= chunk.num_elements
    return [tuple(batch) for batch in batches]
