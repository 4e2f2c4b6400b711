"""A mark of each parameter: whether it is what the host holds of it.

# Note [Marks and fingerprints]
# A fingerprint (gradients/fingerprint.py) finds a flipped bit for certain, and replicas that drift. But it adds up the
# words of a part alike, so two values that a script exchanges, or two signs that it turns, may leave it as it was. What
# a script may do to a parameter is found by a mark, which is of the order of the words too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch

from lockstep.gradients.fingerprint import padded, scrambled

BLOCK_BYTES = 8 << 20
"""How much is marked in one call, at most."""
WORD_BYTES = 4
MARKING_BYTES = 8 * BLOCK_BYTES // WORD_BYTES
"""What a device keeps of random numbers for it."""


def marks(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A 64-bit number for each, on the device that they share: of the bits of a dense tensor, and of their order.

    Where a fingerprint finds a flipped bit, a mark finds any change, but for one in 2^32: each word of 32 bits counts
    as often as a random number of its place says (multilinear hashing: Carter, Wegman 1979; Lemire, Kaser 2014).
    """
    words = [_small_words(tensor) for tensor in tensors]
    plan = _mark_plan(tuple(one.nbytes for one in words), tensors[0].device)
    parts = [part for one in words for part in one.split(BLOCK_BYTES // WORD_BYTES)]
    random = _random_factors(tensors[0].device)
    found = [block.marked(parts, random) for block in plan.blocks]
    return _sums_up_to(torch.cat(found) * plan.factors, plan.ends)


@dataclass(frozen=True)
class MarkBlock:
    """Parts of tensors that are marked together: which, and the places in them that follow the end of each."""

    which: slice
    ends: torch.Tensor

    def marked(self, parts: list[torch.Tensor], factors: torch.Tensor) -> torch.Tensor:
        mine = parts[self.which]
        if len(mine) == 1:
            return (mine[0] * factors[: mine[0].numel()]).sum(0, keepdim=True)
        return _sums_up_to(torch.cat(mine) * torch.cat([factors[: part.numel()] for part in mine]), self.ends)


@dataclass(frozen=True)
class MarkPlan:
    """How tensors of certain sizes are marked: `factors` of their parts' marks, and `ends` of the parts of each."""

    blocks: Sequence[MarkBlock]
    factors: torch.Tensor
    ends: torch.Tensor


@lru_cache(maxsize=16)
def _mark_plan(sizes: tuple[int, ...], device: torch.device) -> MarkPlan:
    cuts = [[min(size - begin, BLOCK_BYTES) for begin in range(0, max(size, 1), BLOCK_BYTES)] for size in sizes]
    lengths = [num_bytes // WORD_BYTES for cut in cuts for num_bytes in cut]
    factors = [3**place % 2**31 for cut in cuts for place in range(len(cut))]
    ends = list(accumulate(map(len, cuts)))
    blocks = [
        MarkBlock(which, torch.tensor(list(accumulate(lengths[which])), device=device)) for which in _together(lengths)
    ]
    return MarkPlan(blocks, torch.tensor(factors, device=device), torch.tensor(ends, device=device))


def _together(lengths: Sequence[int]) -> Iterator[slice]:
    """Parts that follow each other and fill one block, or less."""
    begin, room = 0, BLOCK_BYTES // WORD_BYTES
    for number, length in enumerate(lengths):
        if length > room:
            yield slice(begin, number)
            begin, room = number, BLOCK_BYTES // WORD_BYTES
        room -= length
    yield slice(begin, len(lengths))


def _sums_up_to(values: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The sums of parts that follow each other and end there."""
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    return sums.index_select(0, ends).diff(prepend=values.new_zeros(1))


@lru_cache
def _random_factors(device: torch.device) -> torch.Tensor:
    """A random number for each place in a block, the same in every process."""
    places = torch.arange(BLOCK_BYTES // WORD_BYTES, device=device)
    return scrambled(torch.zeros_like(places), places)


def _small_words(tensor: torch.Tensor) -> torch.Tensor:
    """In the order of memory."""
    dense = tensor.detach().as_strided((tensor.numel(),), (1,))
    return (padded(dense) if dense.nbytes % WORD_BYTES else dense).view(torch.int32)
