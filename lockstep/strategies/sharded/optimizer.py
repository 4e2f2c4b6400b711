"""An optimizer of the user whose update is divided among the workers of a host: what is alike wherever tensors stand.

# Note [The user's own optimizer]
# The optimizer stays the user's object, and its own `step` makes every update. For the time of an update its groups
# hold chunks instead of parameters, and its state has the chunks' state. Between updates the groups hold the
# parameters, and `optimizer.state` has whole tensors, as without sharding: views of memory that the host holds.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch.optim import Optimizer

from lockstep.errors import BadArgument
from lockstep.gradients.fingerprint import combined, fingerprints
from lockstep.optim import LAMB, LARS
from lockstep.strategies.sharded.chunks import ChunkTensor, NumberCopies, Schema, check_state
from lockstep.strategies.sharded.host_gradient import HostGradient
from lockstep.strategies.sharded.ledger import Ledger, release_ledger
from lockstep.strategies.sharded.once import Form, OnceTensors
from lockstep.strategies.sharded.plan import UpdateChunk
from lockstep.wire import Wire

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD,
    torch.optim.Rprop,
)  # fmt: skip
"""An element's update needs its own parameter, gradient and state, and numbers that all elements share."""

BY_TENSOR: tuple[type[Optimizer], ...] = (LARS, LAMB, torch.optim.Adafactor, torch.optim.Muon)
"""A tensor's update needs nothing of other tensors."""


def check_known(optimizer: Optimizer) -> None:
    """Raises unless the updates of such an optimizer are known to need nothing of other tensors."""
    if type(optimizer) not in (*ELEMENTWISE, *BY_TENSOR):
        known = ", ".join(kind.__name__ for kind in (*ELEMENTWISE, *BY_TENSOR))
        raise BadArgument(
            f"the update of {type(optimizer).__name__} cannot be divided among workers: it may need all tensors at "
            f'once, and nobody has checked. Known are {known}. With it, start with strategy="replicated".'
        )


def unhooked_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The `step` of the optimizer's class, without the hooks that torch puts around it."""
    step: Any = type(optimizer).step
    return cast(Callable[[Optimizer], Any], step.__wrapped__ if getattr(step, "hooked", False) else step)


class ShardedOptimizer(ABC):
    """Who updates what of one optimizer, in one generation.

    The order of calls in an update is: `look`; after the first barrier `begin_own`, the optimizer's own `step`,
    `end_own`; after the second, `conclude`. `finish_all`, and then `restore`, are called while a generation forms.
    """

    _state: OnceTensors
    """What `optimizer.state` has between updates."""

    def __init__(self, optimizer: Optimizer, names: Mapping[torch.Tensor, str], wire: Wire) -> None:
        self.optimizer, self.wire = optimizer, wire
        self._group_of, self._owned = _grouped(optimizer)
        self._names = [names[parameter] for parameter in self._owned]
        self._by_tensor = type(optimizer) not in ELEMENTWISE
        self._schemas = _schemas(optimizer)
        self._own = 0
        """This worker's place among those of its host."""
        self._ledgers: list[Ledger] = []
        self._number = 1
        """That of the next update in this generation."""
        self._groups: list[list[torch.Tensor]] | None = None
        """The parameters of each group, while the groups hold chunks."""
        self._numbers: dict[int, dict[str, Any]] = {}

    @property
    def token(self) -> bytes:
        """The same on all workers of a host that stand before, or in, the same update."""
        return self._state.token

    @property
    def is_new(self) -> bool:
        """Whether the next update is the first in this generation."""
        return self._number == 1

    def gradients_fingerprint(self) -> bytes:
        """Of those that the next update uses; what all workers of the host read in one place is not read for it."""
        digest = hashlib.blake2b(digest_size=16)
        for name, parameter in zip(self._names, self._owned, strict=True):
            gradient = parameter.grad
            if isinstance(gradient, HostGradient):
                gradient = torch.empty(0) if gradient.is_as_added else gradient.whole()
            if gradient is not None:
                digest.update(name.encode() + combined(fingerprints({name: gradient})))
        return digest.digest()

    def _deal(self) -> None:
        """Collective. Divides the elements among the workers of this host."""
        members = self.wire.host_members
        self._own = members.index(self.wire.world.rank)
        self._divide(len(members))

    @abstractmethod
    def _divide(self, num_workers: int) -> None:
        """Collective. The same, when this worker's place among them is known."""

    @abstractmethod
    def _tensor_of(self, chunk: UpdateChunk) -> ChunkTensor: ...

    @abstractmethod
    def look(self) -> bytes:
        """Notes what this worker's script has changed since the last update; gives a digest of it."""

    @abstractmethod
    def begin_own(self) -> None:
        """Before `optimizer.step`: this worker's part of the update, or all of it that is not left to that call."""

    @abstractmethod
    def end_own(self) -> None:
        """`optimizer.step` has made the rest of this worker's part."""

    @abstractmethod
    def finish_all(self) -> None:
        """Makes what the workers of this host have not done of the update."""

    @abstractmethod
    def restore(self) -> None:
        """Others may have made this worker's part: what this one holds itself is new too. Not collective."""

    @abstractmethod
    def conclude(self) -> None:
        """All workers have made their part: parameters and `optimizer.state` are new on this one. May be collective."""

    def follow(self, wire: Wire) -> None:
        """Collective. The same memory, divided among the workers of another generation."""
        self.close()
        self.wire = wire
        self._number, self._groups, self._numbers = 1, None, {}
        self._deal()

    def close(self) -> None:
        """No update of it is under way, or will be in this generation."""
        release_ledger(self.wire, self._ledgers[self._own])

    def needs_plan(self, wire: Wire) -> bool:
        """Whether it is divided among the workers of another generation."""
        return self.wire is not wire

    def begin_nothing(self) -> None:
        """Others have made the update of this worker too; `optimizer.step` advances this worker's numbers."""
        self._enter(self._empty)

    def end_nothing(self) -> None:
        self._leave(self._empty)

    def give_up(self) -> None:
        """The groups hold the parameters, whatever has happened."""
        if self._groups is not None:
            self._restore_groups()

    def is_stale(self) -> bool:
        """Whether the optimizer has other parameters, or other state tensors, than those that are held once."""
        group_of, owned = _grouped(self.optimizer)
        if group_of != self._group_of or any(one is not two for one, two in zip(owned, self._owned, strict=True)):
            return True
        return any(
            key not in schema or (schema[key] is not None and value is not self._state.views[f"{name}/{key}"])
            for parameter, name, schema in zip(owned, self._names, self._schemas, strict=True)
            for key, value in self.optimizer.state.get(parameter, {}).items()
        )

    @cached_property
    def _empty(self) -> list[ChunkTensor]:
        """See Note [Empty chunks] in plan.py."""
        empty = [] if self._by_tensor else [UpdateChunk(number, 0, 0) for number in range(len(self._owned))]
        return [self._tensor_of(chunk) for chunk in empty]

    def _enter(self, batch: Sequence[ChunkTensor]) -> None:
        """See Note [The user's own optimizer]."""
        assert self._groups is None
        groups = self.optimizer.param_groups
        self._groups = [group["params"] for group in groups]
        for group in groups:
            group["params"] = []
        numbers = NumberCopies()
        for one in batch:
            if one.is_updated:
                one.enter(self.optimizer, numbers)
                groups[one.group]["params"].append(one.tensor)
        numbers.apply()

    def _leave(self, batch: Sequence[ChunkTensor]) -> None:
        for one in batch:
            if one.is_updated:
                self._numbers[one.chunk.parameter] = one.leave(self.optimizer)
        self._restore_groups()

    def _restore_groups(self) -> None:
        assert self._groups is not None
        for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        self._groups = None

    # -- the state between updates ----------------------------------------------------------------------------

    def _held(self, parameter: int) -> list[str]:
        return [key for key, form in self._schemas[parameter].items() if form is not None]

    def _has_state(self, parameter: int) -> bool:
        return bool(self.optimizer.state.get(self._owned[parameter]))

    def _with_state(self) -> list[int]:
        return [number for number in range(len(self._owned)) if self._has_state(number)]

    def _updated(self) -> list[int]:
        """The parameters that the update under way changes."""
        return [number for number, parameter in enumerate(self._owned) if parameter.grad is not None]

    def _forms(self) -> dict[str, Form]:
        return {
            f"{name}/{key}": form
            for name, schema in zip(self._names, self._schemas, strict=True)
            for key, form in schema.items()
            if form is not None
        }

    def _state_tensors(self) -> dict[str, torch.Tensor]:
        """What the optimizer keeps already."""
        found: dict[str, torch.Tensor] = {}
        for number, (name, schema) in enumerate(zip(self._names, self._schemas, strict=True)):
            if self._has_state(number):
                state = self.optimizer.state[self._owned[number]]
                check_state(self.optimizer, state, schema)
                found |= {f"{name}/{key}": state[key] for key in self._held(number)}
        return found

    def _show_state(self, parameters: Sequence[int]) -> None:
        """`optimizer.state` of the parameters has the views of what is held once."""
        for number in parameters:
            state, name = self.optimizer.state[self._owned[number]], self._names[number]
            for key, form in self._schemas[number].items():
                if form is not None:
                    state[key] = self._state.views[f"{name}/{key}"]
                else:
                    state.setdefault(key, None)

    def _take_numbers(self) -> None:
        """What the update of this worker's chunks has left belongs to the parameters."""
        copies = NumberCopies()
        for number, values in self._numbers.items():
            for key, value in values.items():
                copies.add(self.optimizer.state[self._owned[number]], key, value)
        copies.apply()
        self._numbers = {}


def _grouped(optimizer: Optimizer) -> tuple[list[int], list[torch.Tensor]]:
    """All parameters of the optimizer, and the number of the group of each."""
    pairs = [(number, one) for number, group in enumerate(optimizer.param_groups) for one in group["params"]]
    return [number for number, _ in pairs], [parameter for _, parameter in pairs]


def _schemas(optimizer: Optimizer) -> list[Schema]:
    """What the optimizer keeps for each of its parameters: found by an update of a small tensor in its place."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    schemas: list[Schema] = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            form = Form.of(parameter)
            kind = (number, form if type(optimizer) not in ELEMENTWISE else (form.dtype, form.device))
            if kind not in found:
                found[kind] = _state_after_update(optimizer, group, _stand_in(optimizer, form))
            schemas.append(_schema(optimizer, found[kind], form))
    return schemas


def _stand_in(optimizer: Optimizer, form: Form) -> torch.Tensor:
    """A tensor whose update creates the same state: of two elements, or, if the shape matters, like the parameter."""
    if type(optimizer) in ELEMENTWISE:
        return torch.zeros(2, dtype=form.dtype, device=form.device)
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=form.device).zero_()


def _state_after_update(optimizer: Optimizer, group: Mapping[str, Any], tensor: torch.Tensor) -> dict[str, Any]:
    """An optimizer may make its state when it is made itself (torch 2.11's Adagrad)."""
    own, kind = {**group, "params": [tensor]}, cast(Any, type(optimizer))
    if kind in ELEMENTWISE:
        other = kind([own])
    else:
        other = object.__new__(type(optimizer))
        other.__dict__.update(vars(optimizer), param_groups=[own], state=defaultdict(dict))
    tensor.grad = torch.zeros_like(tensor)
    unhooked_step(optimizer)(other)
    return dict(other.state[tensor])


def _schema(optimizer: Optimizer, state: Mapping[str, Any], form: Form) -> Schema:
    if type(optimizer) in ELEMENTWISE:  # the stand-in has two elements in one dimension
        return {
            key: replace(form, dtype=value.dtype, device=value.device) if _has_elements(value) else None
            for key, value in state.items()
        }
    return {key: Form.of(value) for key, value in state.items()}


def _has_elements(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1
