"""What a reduction does to a dtype.

Sums are bracketed by the tree of `lockstep.lanes`; the other reductions go through the members in
order. So all members hold the same bits, and the same again the next time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.lanes import Assignment, Root, Tree, reduction
from lockstep.wire.shared.kernels import PIECE_BYTES, Work, summation

_COMBINE: dict[str, Callable[..., Any]] = {
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_ORDERED, _BITS = ("MIN", "MAX"), ("BAND", "BOR", "BXOR")
NAMES = ("SUM", "AVG", *_COMBINE)

# Complex numbers come as pairs of real ones from torch.distributed itself, but not from every caller.
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
)


def refusal(name: str, dtype: torch.dtype) -> str:
    """Why tensors of this dtype cannot be combined by this reduction; empty if they can."""
    if name not in NAMES:
        return f"the reduction {name} is not known here; known are {', '.join(NAMES)}"
    if dtype not in DTYPES:
        return f"{_name(dtype)} cannot be reduced; known are {', '.join(map(_name, DTYPES))}"
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if (name in _ORDERED and dtype.is_complex) or (name in _BITS and not whole) or (name == "AVG" and whole):
        return f"{name} is not defined for {_name(dtype)}"
    return ""


def combination(name: str, values: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> Work:
    """Work that writes the reduction of `values`, one of each member in order, to all `places`.

    All tensors are flat and alike; a place may be one of the values, but not overlap one otherwise.
    """
    if name not in ("SUM", "AVG"):
        return _one_by_one(_COMBINE[name], values, places)
    add = summation(_tree(len(values)), {Root(member, 0): value for member, value in enumerate(values)}, places)
    return add if name == "SUM" else _then_divide(add, places, len(values))


def _tree(num_members: int) -> Tree:
    return reduction(Assignment.even(num_members, num_members), tuple(range(num_members))).tree


def _then_divide(add: Work, places: Sequence[torch.Tensor], divisor: int) -> Work:
    def work() -> None:
        add()
        for place in places:
            place.div_(divisor)

    return work


def _one_by_one(combine: Callable[..., Any], values: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> Work:
    """In pieces that stay in the cache. The total has its own memory: a place may be a value that is still needed."""
    step = max(1, PIECE_BYTES // places[0].element_size())

    def work() -> None:
        for start in range(0, places[0].numel(), step):
            piece = slice(start, start + step)
            total = values[0][piece].clone()
            for value in values[1:]:
                combine(total, value[piece], out=total)
            for place in places:
                place[piece].copy_(total)

    return work


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
