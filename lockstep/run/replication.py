"""What `run.replicate` does: models are brought to the run's device, in place, and all workers are made equal.

Workers must have the same model; the first worker's values go to all.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.chance import Generators
from lockstep.data.device import to_device
from lockstep.determinism.hardware import precision
from lockstep.errors import Misuse
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
    is_first = wire.world.rank == 0
    mine = to_bytes(pack_generators(Generators.now(), "generators", tensors), tensors) if is_first else b""
    unpack_generators(*from_bytes(exchange_bytes(wire.transport, mine)[0])).restore()


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


# -- on the device ------------------------------------------------------------------------------------------------


def place_on(device: torch.device, module: torch.nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """What was on the CPU is on `device`; the parameters are the same objects. What is on another device stays there.

    With the CPU as device nothing is touched.
    """
    if device.type == "cpu":
        return
    before = list(module.parameters())
    # What Module.to does, but only for tensors on the CPU: a model may be spread over GPUs on purpose.
    module._apply(lambda tensor: tensor.to(device) if tensor.device.type == "cpu" else tensor)
    _check_same(before, list(module.parameters()), module, device)
    for optimizer in optimizers:
        place_state(optimizer)
        _place_rates(optimizer, device)


def _place_rates(optimizer: Optimizer, device: torch.device) -> None:
    """A rate that is a tensor goes where the update reads it without asking the host, if the optimizer can do so."""
    for group in optimizer.param_groups:
        if group.get("capturable"):
            for name, value in group.items():
                if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                    group[name] = value.to(device)


def place_state(optimizer: Optimizer) -> None:
    """The state of each parameter is on its device, as if it had been loaded there by `load_state_dict`.

    So a `step` that is counted on the CPU stays there, unless the optimizer is fused or capturable.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if key != "step" or group.get("capturable") or group.get("fused"):
                    state[key] = to_device(value, parameter.device)


def _check_same(before: list[Any], after: list[Any], module: torch.nn.Module, device: torch.device) -> None:
    if [id(parameter) for parameter in before] != [id(parameter) for parameter in after]:
        raise Misuse(
            f"moving {type(module).__name__} to {device} replaced its parameters, and its optimizer would go on with "
            "the old ones. Leave torch.__future__.set_overwrite_module_params_on_conversion at False, or move the "
            "model by model.to(run.device) before you make the optimizer."
        )
