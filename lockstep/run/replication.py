"""Makes all workers equal at the start: they must have the same model; the first worker's values go to all."""

from typing import Any

import torch

from lockstep.determinism.hardware import precision
from lockstep.state.models import Models
from lockstep.state.snapshot import Tensors, from_bytes, pack_generators, to_bytes, unpack_generators
from lockstep.wire import Agreement, Proposal, Wire, broadcast
from lockstep.wire.exchange import exchange_bytes

CHUNK_BYTES = 64 * 1024 * 1024


def join(models: Models, wire: Wire) -> None:
    """Collective. Refuses different models or precision with the first difference; afterwards all hold worker 0's bits.

    Their generators outside of lanes stand where worker 0's do: what a script drew by rank while it set up does not
    count. See Note [Precision is the user's] in hardware.py.
    """
    plan = Proposal({"operation": "replicate a model"} | precision() | signature(models))
    Agreement(wire.transport, plan).check()
    with torch.no_grad():
        state = {name: value for name, value in models.everything().items() if torch.is_tensor(value)}
        for chunk in _chunks(list(state.values())):
            _broadcast_chunk(chunk, wire)
    _share_generators(wire)


def _share_generators(wire: Wire) -> None:
    if not wire.world.peers:
        return
    tensors: Tensors = {}
    mine = to_bytes(pack_generators(tensors), tensors) if wire.world.rank == 0 else b""
    unpack_generators(*from_bytes(exchange_bytes(wire.transport, mine)[0]))


def signature(models: Models) -> dict[str, str]:
    """What must be equal on all workers before their values can be: one line per parameter, buffer and setting."""
    facts = {}
    for named in models.parameters():
        trained = "" if named.parameter.requires_grad else ", frozen"
        facts[f"parameter {named.name}"] = _shape(named.parameter) + trained
    facts |= {f"buffer {name}": _shape(buffer) for name, buffer in models.buffers()}
    for label, optimizer in models.optimizers.items():
        facts[f"class of {label}"] = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            facts[f"group {number} of {label}"] = f"{len(group['params'])} parameters, {_settings(settings)}"
    return facts | {name: _shape(value) for name, value in models.optimizer_state().items()}


def _shape(value: Any) -> str:
    if not torch.is_tensor(value):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={float(v) if torch.is_tensor(v) else v}" for key, v in sorted(settings.items()))


def _chunks(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors in groups of at most CHUNK_BYTES, so that packing them needs little memory."""
    chunks: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        if not chunks or tensor.nbytes > room:
            chunks.append([])
            room = CHUNK_BYTES
        chunks[-1].append(tensor)
        room -= tensor.nbytes
    return chunks


def _broadcast_chunk(tensors: list[torch.Tensor], wire: Wire) -> None:
    flat = torch.cat([tensor.contiguous().flatten().view(torch.uint8).cpu() for tensor in tensors])
    broadcast(wire.transport, flat, source=0)
    for tensor, piece in zip(tensors, flat.split([tensor.nbytes for tensor in tensors]), strict=True):
        tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))
