"""What lanes found, added up or gathered: every lane once, in an order that does not depend on the workers."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import BadArgument
from lockstep.state.snapshot import Tensors, from_bytes, pack, to_bytes, unpack
from lockstep.wire import Agreement, Proposal, Wire, exchange
from lockstep.wire.exchange import exchange_bytes, exchange_texts


@dataclass(frozen=True)
class Visit:
    """A lane that this worker computed, in the `loop`-th use of run.lanes; it `counts` unless its step was undone."""

    loop: int
    lane: int
    counts: bool = True


def total_of(value: Any, visits: Sequence[Visit], wire: Wire, step: int) -> Any:
    """Collective. The sum of all workers' values; of a list of per-lane values, the sum in lane order."""
    if not isinstance(value, torch.Tensor) and getattr(value, "ndim", None) == 0:  # one of NumPy's numbers
        value = value.item()
    kind = _kind(value)
    Agreement(wire.transport, Proposal({"operation": "run.total", "step": step, "kind of value": kind})).check()
    if isinstance(value, torch.Tensor):
        return _total_of_tensors(value, wire)
    if isinstance(value, list | tuple):
        return _total_of_lanes(_of_lanes("run.total", [_number(item) for item in value], visits), wire)
    numbers = [json.loads(text) for text in exchange_texts(wire.transport, json.dumps(value))]
    return math.fsum(numbers) if isinstance(value, float) else sum(numbers)


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
        return f"{value.dtype} tensor {list(value.shape)}"
    if isinstance(value, list | tuple):
        return "values by lane"
    if isinstance(value, int | float):
        return "float" if isinstance(value, float) else "int"
    raise BadArgument(f"run.total adds numbers, tensors or a list with one number per lane, not {type(value).__name__}")


def _total_of_tensors(value: torch.Tensor, wire: Wire) -> torch.Tensor:
    flat = value.detach().cpu().contiguous().flatten()
    flat = flat.long() if flat.dtype == torch.bool else flat
    if flat.numel() == 0:
        return value.detach().clone()
    records = exchange(wire.transport, flat.view(torch.uint8).clone())
    summed = torch.stack([record.view(flat.dtype) for record in records]).sum(0, dtype=flat.dtype)
    return summed.view(value.shape).to(value.device)


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
    if isinstance(item, torch.Tensor) and item.numel() == 1:
        return item.item()
    if isinstance(item, int | float):
        return item
    raise BadArgument(f"run.total takes one number per lane, not {type(item).__name__}")
