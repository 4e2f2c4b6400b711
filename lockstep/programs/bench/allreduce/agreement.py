"""Are the sums right? A faster wrong answer is worth nothing, so this comes before any timing.

The numbers are whole and small, so that float32 adds them without rounding: in any order every sum has the same bits.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lockstep.programs.bench.allreduce.plan import GLOO, LOCKSTEP, Part
from lockstep.programs.bench.allreduce.sides import Side
from lockstep.wire import exchange
from lockstep.wire.transport import Transport

COMPARED = (LOCKSTEP, GLOO)
RIGHT = -1
_PERIOD = 251  # a prime: a slice that lands in another's place shows


def object_to(part: Part, sides: Mapping[str, Side], transport: Transport) -> str | None:
    """Collective. The sentence that stops the benchmark, the same on every worker, or None if all sums are right."""
    rank = transport.world.rank
    found = torch.tensor([first_wrong(sides[name], rank, part.workers) for name in COMPARED])
    return refusal(part, [record.view(torch.int64).tolist() for record in exchange(transport, found.view(torch.uint8))])


def first_wrong(side: Side, rank: int, num_workers: int) -> int:
    """Collective. Where the sum of one all-reduce is wrong for the first time, or RIGHT."""
    base = _numbers(side.tensor.numel(), side.tensor.device)
    torch.mul(base, rank + 1, out=side.tensor)
    side.operate()
    expected = base.mul_(num_workers * (num_workers + 1) // 2)
    if torch.equal(side.tensor, expected):
        return RIGHT
    return int((side.tensor != expected).nonzero()[0])


def refusal(part: Part, found: Sequence[Sequence[int]]) -> str | None:
    """Names the first side, worker and element that is wrong; `found` is by worker, then by compared side."""
    for number, name in enumerate(COMPARED):
        for rank, firsts in enumerate(found):
            if firsts[number] != RIGHT:
                return (
                    f"{part.title}: the sum by {name} is wrong on worker {rank}, "
                    f"first at element {firsts[number]}. Nothing of this size was timed"
                )
    return None


def _numbers(count: int, device: torch.device) -> Tensor:
    """0 to 250 over and over."""
    return torch.arange(_PERIOD, dtype=torch.float32, device=device).repeat(count // _PERIOD + 1)[:count]
