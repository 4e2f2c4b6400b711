"""What lanes found, added up or gathered: every lane once, in an order that does not depend on the workers.

# Note [Zero of the others' kind]
# `total = 0` and `total += loss` in each lane: a worker that had no lanes still has the plain 0, where others have
# floats, tensors or lists. So a plain 0 does not say of which kind a total is. Where kinds differ, workers send whether
# theirs is 0, and all judge alike whether the others agree.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import BadArgument, Disagreement
from lockstep.state.snapshot import DTYPES, Tensors, from_bytes, pack, to_bytes, unpack
from lockstep.wire import Agreement, Proposal, Wire, exchange
from lockstep.wire.agreement import Facts, first_difference
from lockstep.wire.exchange import exchange_bytes, exchange_texts


@dataclass(frozen=True)
class Visit:
    """A lane that this worker computed, in the `loop`-th use of run.lanes; it `counts` unless its step was undone."""

    loop: int
    lane: int
    counts: bool = True


KIND, ZERO, BY_LANE, TENSOR = "kind of value", "is zero", "values by lane", " tensor "


def total_of(value: Any, visits: Sequence[Visit], wire: Wire, step: int, device: torch.device) -> Any:
    """Collective. The sum of all workers' values; of a list of per-lane values, the sum in lane order.

    A plain 0 counts as one of the others' kind, on `device` where they have tensors.
    """
    value = _as_python(value)
    kinds = _Kinds(_kind(value))
    is_zero = type(value) is int and value == 0
    facts = {"operation": "run.total", "step": step, KIND: kinds.agreed}
    Agreement(wire.transport, Proposal(facts, lambda: {ZERO: str(is_zero)}, judge=kinds.judge)).check()
    if is_zero:
        value = _zero(kinds.agreed, device)
    if isinstance(value, torch.Tensor):
        return _total_of_tensors(value, wire)
    if isinstance(value, list | tuple):
        return _total_of_lanes(_of_lanes("run.total", [_number(item) for item in value], visits), wire)
    numbers = [json.loads(text) for text in exchange_texts(wire.transport, json.dumps(value))]
    is_exact = isinstance(value, float) and all(map(math.isfinite, numbers))
    return math.fsum(numbers) if is_exact else sum(numbers)


@dataclass
class _Kinds:
    """The kind of what is added, on which all workers agree. See Note [Zero of the others' kind]."""

    agreed: str

    def judge(self, here: int, everyone: Sequence[Facts]) -> Disagreement | None:
        facts = [{name: fact for name, fact in one.items() if name != ZERO} for one in everyone]
        kinds = {one.get(KIND) for one, zero in zip(facts, everyone, strict=True) if zero.get(ZERO) != "True"}
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is None or any({**one, KIND: kind} != {**facts[here], KIND: kind} for one in facts):
            return first_difference(here, facts)
        self.agreed = kind
        return None


def _zero(kind: str, device: torch.device) -> Any:
    dtype, _, shape = kind.partition(TENSOR)
    if shape:
        return torch.zeros(json.loads(shape), dtype=DTYPES[dtype], device=device)
    return {BY_LANE: [], "float": 0.0}.get(kind, 0)


def gathered(values: Any, visits: Sequence[Visit], wire: Wire, step: int) -> list[Any]:
    """Collective. What all lanes have given, in the order of loops and lanes; tensors are on the CPU."""
    if not isinstance(values, list | tuple):
        raise BadArgument(f"run.gather takes a list with one entry for each lane, not {type(values).__name__}")
    tensors: Tensors = {}
    mine = [
        [visit.loop, visit.lane, pack(value, f"entry {number} of run.gather", tensors)]
        for number, (visit, value) in enumerate(_of_lanes("run.gather", values, visits))
    ]
    Agreement(wire.transport, Proposal({"operation": "run.gather", "step": step})).check()
    everyone = [from_bytes(theirs) for theirs in exchange_bytes(wire.transport, to_bytes(mine, tensors))]
    entries = [(loop, lane, value, held) for given, held in everyone for loop, lane, value in given]
    return [unpack(value, held) for *_, value, held in sorted(entries, key=lambda entry: entry[:2])]


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.uint64:
            raise BadArgument("run.total does not add uint64 tensors: give run.total(value.long()), or value.double()")
        return f"{str(value.dtype).removeprefix('torch.')}{TENSOR}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return BY_LANE
    if isinstance(value, int | float):
        return "float" if isinstance(value, float) else "int"
    raise BadArgument(
        f"run.total adds real numbers, tensors or a list with one number per lane, not {type(value).__name__}"
    )


def _as_python(value: Any) -> Any:
    """One of NumPy's numbers as one of Python's."""
    is_of_numpy = not isinstance(value, torch.Tensor) and getattr(value, "ndim", None) == 0
    return value.item() if is_of_numpy else value


def _total_of_tensors(value: torch.Tensor, wire: Wire) -> torch.Tensor:
    flat = value.detach().cpu().contiguous().flatten()
    flat = flat.long() if flat.dtype == torch.bool else flat
    if flat.numel() == 0:
        return value.detach().clone()
    records = exchange(wire.transport, flat.view(torch.uint8).clone())
    parts = torch.stack([record.view(flat.dtype) for record in records])
    is_whole = not (flat.is_floating_point() or flat.is_complex())
    summed = _sum_of_whole(parts) if is_whole else parts.sum(0, dtype=flat.dtype)
    return summed.view(value.shape).to(value.device)


def _sum_of_whole(parts: torch.Tensor) -> torch.Tensor:
    """The sum of the rows, in their dtype; it is made in two halves, so that none beyond int64 goes unnoticed."""
    kind, wide = parts.dtype, parts.long()
    low = (wide & 0xFFFFFFFF).sum(0)
    high = (wide >> 32).sum(0) + (low >> 32)
    total = (high << 32) | (low & 0xFFFFFFFF)
    if not torch.equal(total >> 32, high) or not torch.equal(total.to(kind).long(), total):
        name = str(kind).removeprefix("torch.")
        wider = "value.double()" if kind == torch.int64 else "value.long()"
        raise BadArgument(f"run.total: a sum of these {name} tensors does not fit {name}: give run.total({wider})")
    return total.to(kind)


def _total_of_lanes(values: Sequence[tuple[Visit, float]], wire: Wire) -> float:
    mine = [[visit.loop, visit.lane, value] for visit, value in values]
    everyone = exchange_texts(wire.transport, json.dumps(mine))
    total = 0
    for _, _, value in sorted(entry for text in everyone for entry in json.loads(text)):
        total += value
    return total


def _of_lanes(what: str, values: Sequence[Any], visits: Sequence[Visit]) -> list[tuple[Visit, Any]]:
    """The values with their lanes, the last ones that this worker has computed, without those of undone steps."""
    if len(values) > len(visits):
        num_lanes = sum(visit.counts for visit in visits)
        raise BadArgument(
            f"{what} was given {len(values)} values, but this worker has computed {num_lanes} lanes since the "
            "last training step began: give one value per lane"
        )
    places = visits[len(visits) - len(values) :]
    return [(visit, value) for visit, value in zip(places, values, strict=True) if visit.counts]


def _number(item: Any) -> float:
    number = item.item() if isinstance(item, torch.Tensor) and item.numel() == 1 else _as_python(item)
    if isinstance(number, int | float):
        return number
    raise BadArgument(f"run.total takes one real number per lane, not {type(number).__name__}")
