"""A member's call, as bytes that all members compare before any data moves.

# Note [Words before data]
# Collectives are matched by position: the third call of one member meets the third call of another. Every call
# therefore begins with a meeting at which each member shows its call. If two differ, or one is impossible, all members
# raise the same error at the same call; only the members' own staging memory was written, and the group stays usable.
# The words do not hold the number of the call: it is the same on all members by construction, and without it equal
# words, which are the rule, are found in a dictionary.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from lockstep.errors import BadArgument, Disagreement
from lockstep.torch_backend.flat import MemberParts
from lockstep.torch_backend.reductions import refusal


@dataclass(frozen=True)
class CollectiveCall:
    """One operation as one member sees it. Sizes count elements; `gives` and `takes` are by tensor, then by member."""

    operation: str
    dtypes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    reduction: str = "none"
    root: int = -1
    gives: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()
    fault: str = ""


@lru_cache(maxsize=1024)
def encode(call: CollectiveCall) -> bytes:
    return json.dumps([getattr(call, field.name) for field in fields(call)]).encode()


@lru_cache(maxsize=1024)
def decode(words: bytes) -> CollectiveCall:
    values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in json.loads(words)]
    return CollectiveCall(*values)


def check(calls: Mapping[int, CollectiveCall], here: int, global_ranks: Sequence[int]) -> None:
    """Raises on every member if two calls differ, or one is impossible. See Note [Words before data].

    Members are named by their global ranks, whatever the group.
    """
    for there, call in calls.items():
        _check_equal(calls[here], call, global_ranks[here], global_ranks[there], ["operation"])
    for member, call in calls.items():  # first: in a faulty call the other fields may be unknown
        if call.fault:
            raise BadArgument(f"{call.operation} on worker {global_ranks[member]}: {call.fault}. {ADVICE}")
    for there, call in calls.items():
        _check_equal(calls[here], call, global_ranks[here], global_ranks[there], list(_COMPARED))
    for giver, taker in product(calls, calls):
        _check_pair(calls, giver, taker, global_ranks)


ADVICE = "Nothing was exchanged, and the group can be used on."

_COMPARED = {
    "operation": "the operation",
    "dtypes": "the dtype",
    "sizes": "the number of elements",
    "reduction": "the reduction",
    "root": "the root",
}


def _check_equal(mine: CollectiveCall, theirs: CollectiveCall, here: int, there: int, names: Sequence[str]) -> None:
    for name in names:
        if getattr(mine, name) != getattr(theirs, name):
            what = _COMPARED[name] if name == "operation" else f"{_COMPARED[name]} of {mine.operation}"
            advice = f"All members must make the same calls in the same order. {ADVICE}"
            raise Disagreement(
                what, here, _in_words(getattr(mine, name)), there, _in_words(getattr(theirs, name)), advice
            )


def _check_pair(calls: Mapping[int, CollectiveCall], giver: int, taker: int, global_ranks: Sequence[int]) -> None:
    """Raises unless what one member gives to another is what the other takes."""
    given, taken = part(calls[giver].gives, taker, len(calls)), part(calls[taker].takes, giver, len(calls))
    if given != taken:
        what = f"the number of elements that the first gives to the second in {calls[giver].operation}"
        raise Disagreement(what, global_ranks[giver], _in_words(given), global_ranks[taker], _in_words(taken), ADVICE)


def _in_words(value: object) -> str:
    return ", ".join(map(str, value)) or "nothing" if isinstance(value, tuple) else str(value)


def part(sizes: tuple[int, ...], member: int, num_members: int) -> tuple[int, ...]:
    """Of sizes by tensor and member, those of one member."""
    return sizes[member::num_members]


# -- from a caller's arguments -----------------------------------------------------------------------------------


def exchange_call(
    operation: str, given: Sequence[MemberParts], taken: Sequence[MemberParts], *, root: int = -1, fault: str = ""
) -> CollectiveCall:
    """The call of an exchange: one entry of `given` and `taken` for each tensor."""
    fault = fault or unusable([tensor for parts in (*given, *taken) for tensor in parts.tensors])
    fault = fault or unwritable([tensor for parts in taken for tensor in parts.tensors])
    if fault:
        return CollectiveCall(operation, root=root, fault=fault)
    dtypes = [{tensor.dtype for tensor in (*gives.tensors, *takes.tensors)} for gives, takes in _pairs(given, taken)]
    if mixed := [kinds for kinds in dtypes if len(kinds) > 1]:
        return CollectiveCall(operation, root=root, fault=_mixed(mixed[0]))
    return CollectiveCall(
        operation,
        tuple(dtype_name(kinds.pop()) for kinds in dtypes),
        root=root,
        gives=tuple(size for parts in given for size in parts.sizes),
        takes=tuple(size for parts in taken for size in parts.sizes),
    )


def reduction_call(
    operation: str, tensors: Sequence[torch.Tensor], sizes: Sequence[int], op: Any, *, root: int = -1, fault: str = ""
) -> CollectiveCall:
    """The call of a reduction of `tensors`, which all have one dtype."""
    reduction = reduction_name(op)
    dtype = tensors[0].dtype
    fault = fault or unusable(tensors) or refusal(reduction, dtype)
    if not fault and any(tensor.dtype != dtype for tensor in tensors):
        fault = _mixed({tensor.dtype for tensor in tensors})
    return CollectiveCall(operation, (dtype_name(dtype),), tuple(sizes), reduction, root, fault=fault)


def unusable(tensors: Sequence[torch.Tensor]) -> str:
    """Why the tensors cannot be exchanged here; empty if they can."""
    for tensor in tensors:
        if tensor.layout != torch.strided:
            return f"a tensor of layout {tensor.layout}; make it dense, or use the backend gloo"
        if not tensor.is_cpu:
            return f'a tensor on {tensor.device}; "lockstep" is for the CPU: use gloo, or nccl for a GPU, there'
    return ""


def unwritable(tensors: Iterable[torch.Tensor]) -> str:
    """Why results cannot be written to the tensors; empty if they can."""
    if any(map(_shares_memory, tensors)):
        return "a tensor whose elements share memory, as after expand(), cannot be written; give a contiguous() one"
    return ""


def _shares_memory(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def reduction_name(op: Any) -> str:
    """SUM, AVG and so on, of torch's ReduceOp in any of its forms."""
    return str(getattr(op, "op", op)).rsplit(".", 1)[-1]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def split_sizes(splits: Sequence[int], tensor: torch.Tensor, num_members: int) -> tuple[list[int], str]:
    """How many elements of a tensor that is split along dimension 0 belong to each member; or why it cannot be."""
    num_rows = tensor.shape[0] if tensor.dim() else 1
    rows = list(splits) or [num_rows // num_members] * num_members
    if len(rows) != num_members or sum(rows) != num_rows or min(rows) < 0:
        how = f"into {rows}" if splits else f"evenly among {num_members} members"
        return [0] * num_members, f"a tensor with {num_rows} rows cannot be split {how}"
    row_elements = tensor.numel() // num_rows if num_rows else 0
    return [row * row_elements for row in rows], ""


def _mixed(dtypes: Iterable[torch.dtype]) -> str:
    return f"tensors of different dtypes: {', '.join(sorted(map(dtype_name, dtypes)))}"


def _pairs(given: Sequence[MemberParts], taken: Sequence[MemberParts]) -> Sequence[tuple[MemberParts, MemberParts]]:
    return list(zip(given, taken, strict=True))
