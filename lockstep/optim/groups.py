"""Parameter groups: which parameters are treated alike, and what their options may be."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lockstep.errors import BadArgument

# _NormBase is what BatchNorm*, SyncBatchNorm, InstanceNorm* and their lazy forms have in common.
NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def exclude_biases_and_norms(model: nn.Module, weight_decay: float, **options: Any) -> list[dict[str, Any]]:
    """Two parameter groups that hold every parameter of the model exactly once: those that decay, and the rest.

    The second group has `weight_decay=0` and `adapt=False` (trust ratio 1): biases, parameters of normalisation
    layers, and every other tensor with fewer than two dimensions. A shared parameter that is one of these in any of
    its places belongs to it. Frozen parameters are included. `options` go into both groups.
    """
    _check_arguments(model, weight_decay, options)
    excluded = {id(parameter) for parameter in _biases_and_norms(model)}
    decaying = [parameter for parameter in model.parameters() if id(parameter) not in excluded]
    plain = [parameter for parameter in model.parameters() if id(parameter) in excluded]
    return [
        {**options, "params": decaying, "weight_decay": weight_decay, "adapt": True},
        {**options, "params": plain, "weight_decay": 0.0, "adapt": False},
    ]


def _check_arguments(model: nn.Module, weight_decay: float, options: Mapping[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise BadArgument(f"exclude_biases_and_norms was given a {type(model).__name__}; write the model itself")
    check_options("exclude_biases_and_norms", {"weight_decay": weight_decay}, {"weight_decay": NOT_NEGATIVE})
    if taken := sorted({"params", "adapt"} & options.keys()):
        raise BadArgument(f"exclude_biases_and_norms sets {', '.join(taken)} itself; leave it out")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise BadArgument(f"parameter {name} has no shape yet; run the model on one batch first")


def _biases_and_norms(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(module, NORMALISATIONS) or parameter.dim() < 2 or _names_a_bias(name):
                yield parameter


def _names_a_bias(name: str) -> bool:
    """As in Linear (`bias`), and in MultiheadAttention (`in_proj_bias`, `bias_k`)."""
    return name == "bias" or name.endswith("_bias") or name.startswith("bias_")


@dataclass(frozen=True)
class Allowed:
    """What an option of a group may be, and what to write where it is something else."""

    holds: Callable[[Any], bool]
    advice: str


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_fraction(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


FLAG = Allowed(lambda value: isinstance(value, bool), "True or False")
FLAG_OR_NONE = Allowed(lambda value: value is None or isinstance(value, bool), "True, False or None")
NOT_NEGATIVE = Allowed(lambda value: _is_number(value) and value >= 0, "a number that is 0 or more")
POSITIVE = Allowed(lambda value: _is_number(value) and value > 0, "a number greater than 0")
POSITIVE_OR_NONE = Allowed(lambda value: value is None or POSITIVE.holds(value), "a number greater than 0, or None")
FRACTION = Allowed(_is_fraction, "a number from 0 up to but not including 1")
TWO_FRACTIONS = Allowed(
    lambda value: isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_fraction, value)),
    "two numbers from 0 up to but not including 1, such as (0.9, 0.999)",
)


def check_options(whose: str, options: Mapping[str, Any], allowed: Mapping[str, Allowed]) -> None:
    """Raises BadArgument for the first option whose value is not allowed."""
    for name, rule in allowed.items():
        if not rule.holds(options[name]):
            raise BadArgument(f"{whose}: {name} is {options[name]!r}; write {rule.advice}")
