"""From a caller's arguments to a CollectiveCall: what is asked for, or why it cannot be done."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lockstep.torch_backend.call import CollectiveCall
from lockstep.torch_backend.flat import MemberParts
from lockstep.torch_backend.reductions import refusal


def exchange_call(
    operation: str, given: Sequence[MemberParts], taken: Sequence[MemberParts], *, root: int = -1, fault: str = ""
) -> CollectiveCall:
    """The call of an exchange: one entry of `given` and `taken` for each tensor."""
    fault = fault or unusable([tensor for parts in (*given, *taken) for tensor in parts.tensors])
    fault = fault or unwritable([tensor for parts in taken for tensor in parts.tensors])
    if fault:
        return CollectiveCall(operation, root=root, fault=fault)
    dtypes = [{tensor.dtype for tensor in (*gives.tensors, *takes.tensors)} for gives, takes in _pairs(given, taken)]
    if mixed := [found for found in dtypes if len(found) > 1]:
        return CollectiveCall(operation, root=root, fault=_mixed(mixed[0]))
    return CollectiveCall(
        operation,
        tuple(dtype_name(found.pop()) for found in dtypes),
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
        told = f"into {rows}" if splits else f"evenly among {num_members} members"
        return [0] * num_members, f"a tensor with {num_rows} rows cannot be split {told}"
    row_elements = tensor.numel() // num_rows if num_rows else 0
    return [row * row_elements for row in rows], ""


def _mixed(dtypes: Iterable[torch.dtype]) -> str:
    return f"tensors of different dtypes: {', '.join(sorted(map(dtype_name, dtypes)))}"


def _pairs(given: Sequence[MemberParts], taken: Sequence[MemberParts]) -> Sequence[tuple[MemberParts, MemberParts]]:
    return list(zip(given, taken, strict=True))
