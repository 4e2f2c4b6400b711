"""Puts a model and what its optimizers know of it onto the run's device, in place."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.data.device import to_device
from lockstep.errors import Misuse


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
