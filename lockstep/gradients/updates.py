"""Optimizers that update whole buckets: one flat tensor instead of one tensor for each parameter.

# Note [Inside the update]
# torch's optimizers gather what they update by their method `_init_group`, and this is where flat parameters take the
# place of a bucket's own: param_groups, hooks, closures, schedulers and state_dict never see them. A bucket that cannot
# be updated as one is left to torch as it is, and comes to the same bits.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from lockstep.errors import BadArgument, BadEnvironment
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.flat import STEP, VECTOR, FlatBucket, sharing_memory

KINDS = (SGD, Adam, AdamW)
DEVICES = ("cuda",)
"""Where a fused update gives an element the same bits wherever it stands in a tensor."""


class FlatUpdates:
    """Makes `optimizer.step()` update whole buckets, until `close`. See Note [Inside the update]."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._buckets: list[FlatBucket] = []
        self._under_way: list[FlatBucket] = []
        self._hooks = [_hooked_first(optimizer, self._updated) for optimizer in self._optimizers]
        for optimizer in self._optimizers:
            optimizer._init_group = partial(self._gather, optimizer, optimizer._init_group)  # type: ignore[attr-defined]

    def groups(self, parameters: Sequence[torch.nn.Parameter]) -> list[int]:
        """Of each parameter the number of its optimizer's group, from 1: those of different groups share no bucket.

        0 for one that cannot be flat: no optimizer has it, or two have, its memory is also somebody else's, or it is
        not made of whole vectors (Note [Whole vectors] in flat.py).
        """
        found: dict[int, list[int]] = {}
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        for number, group in enumerate(groups, 1):
            for parameter in group["params"]:
                found.setdefault(id(parameter), []).append(number)
        shared = sharing_memory(parameters)
        numbers = [found.get(id(parameter), []) for parameter in parameters]
        return [
            listed[0] if len(listed) == 1 and id(parameter) not in shared and parameter.numel() % VECTOR == 0 else 0
            for parameter, listed in zip(parameters, numbers, strict=True)
        ]

    def follow(self, buckets: Iterable[Bucket]) -> None:
        """The layout is another one: parameters move now, state with the next update. See Note [Linked] in flat.py."""
        self._buckets = [FlatBucket(bucket) for bucket in buckets if bucket.layout.group]
        for flat in self._buckets:
            flat.place()

    @property
    def hook_numbers(self) -> set[int]:
        """The numbers of the hooks that this has on the optimizers."""
        return {hook.id for hook in self._hooks}

    def close(self) -> None:
        """The optimizers update as they did before; parameters and state stay where they are."""
        for hook, optimizer in zip(self._hooks, self._optimizers, strict=True):
            hook.remove()
            vars(optimizer).pop("_init_group", None)

    def _gather(self, optimizer: Optimizer, gather: Callable[..., Any], group: dict[str, Any], *lists: Any) -> Any:
        """In place of the optimizer's own: gathers flat parameters, and the others as they are."""
        if group is optimizer.param_groups[0]:
            self._under_way = []  # of an update that failed
        keys = _keys(optimizer, group)
        flats = self._ready(optimizer, group, keys)
        taken = {id(parameter) for flat in flats for parameter in flat.parameters}
        others = [parameter for parameter in group["params"] if id(parameter) not in taken]
        wholes = [flat.whole for flat in flats]
        self._under_way += flats
        try:
            optimizer.state.update(zip(wholes, (flat.state(keys) for flat in flats), strict=True))
            return gather({**group, "params": [*wholes, *others]}, *lists)
        finally:
            _forget(optimizer, flats)

    def _ready(self, optimizer: Optimizer, group: Mapping[str, Any], keys: Sequence[str]) -> list[FlatBucket]:
        held = {id(parameter) for parameter in group["params"]}
        mine = [flat for flat in self._buckets if all(id(parameter) in held for parameter in flat.parameters)]
        empty: dict[str, Any] = {}
        return [flat for flat in mine if flat.ready([optimizer.state.get(p, empty) for p in flat.parameters], keys)]

    def _updated(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        done, self._under_way = self._under_way, []
        _forget(optimizer, done)  # SGD writes a state for all that it has updated
        for flat in done:
            flat.updated()


def check_flat(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Refuses optimizers whose updates cannot be flat, and a device on which the bits would be others.

    `device` is where parameters go that are on the CPU now.
    """
    for optimizer in optimizers:
        kind = type(optimizer)
        unfused = [group for group in optimizer.param_groups if not group.get("fused") or group.get("differentiable")]
        if kind not in KINDS or unfused:
            what = kind.__name__ if kind not in KINDS else f"{kind.__name__} without fused=True"
            raise BadArgument(
                f"flat=True updates torch.optim.SGD, Adam and AdamW themselves, made with fused=True, not {what}. "
                "Make the optimizer so, or leave flat out."
            )
        _check_devices(optimizer, device)


def _check_devices(optimizer: Optimizer, device: torch.device) -> None:
    found = {parameter.device.type for group in optimizer.param_groups for parameter in group["params"]}
    devices = {device.type if kind == "cpu" else kind for kind in found}
    for other in devices - set(DEVICES):
        raise BadEnvironment(
            f"flat=True needs parameters on a GPU, but {type(optimizer).__name__} has some on {other}: there torch "
            "rounds the last elements of a tensor otherwise than those before them, and a flat update would give other "
            "bits. Leave flat out."
        )


def _keys(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    """What the optimizer keeps of each parameter of the group."""
    if isinstance(optimizer, SGD):
        return ("momentum_buffer",) if group["momentum"] != 0 else ()
    return (STEP, "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


def _forget(optimizer: Optimizer, flats: Iterable[FlatBucket]) -> None:
    for flat in flats:
        optimizer.state.pop(flat.whole, None)


def _hooked_first(optimizer: Optimizer, hook: Callable[..., None]) -> "torch.utils.hooks.RemovableHandle":
    """A hook that runs after an update and before all other hooks: they see per-parameter state only."""
    handle = optimizer.register_step_post_hook(hook)
    cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks).move_to_end(handle.id, last=False)
    return handle
