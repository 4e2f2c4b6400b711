"""A batch of chunks as an optimizer sees them: small tensors with a gradient and a state, made once and used again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.optim import Optimizer

from lockstep.errors import Misuse
from lockstep.strategies.sharded.host_gradient import HostGradient
from lockstep.strategies.sharded.once import Form, flat
from lockstep.strategies.sharded.plan import UpdateChunk

Schema = Mapping[str, Form | None]
"""What an optimizer keeps for a parameter: tensors that are held once, and (None) numbers that each worker has."""


@dataclass(eq=False)
class ChunkTensor:
    """A part of a parameter, as a tensor of its own: `tensor` and `held` are memory that all workers of the host see.

    Where an update needs whole tensors (`is_whole`) it has the parameter's shape, else one dimension.
    """

    chunk: UpdateChunk
    parameter: torch.Tensor
    group: int
    schema: Schema
    is_whole: bool
    tensor: torch.Tensor
    held: dict[str, torch.Tensor]
    _state: dict[str, Any] = field(default_factory=dict)
    _gradient: "tuple[ReferenceType[torch.Tensor], int] | None" = None
    """That of the parameter in the last update, and where it stood. If it comes again, `tensor.grad` is kept."""

    @property
    def is_updated(self) -> bool:
        """Whether the update under way has a gradient for it."""
        return self.parameter.grad is not None

    def _comes_again(self, gradient: torch.Tensor) -> bool:
        """Whether it is the one of the last update, at the same place: then it is the run's own."""
        if isinstance(gradient, HostGradient):
            return False
        last = None if self._gradient is None else (self._gradient[0](), self._gradient[1])
        is_same = last is not None and last[0] is gradient and last[1] == gradient.data_ptr()
        return is_same and gradient.stride() == self.parameter.stride()

    def memory(self) -> list[torch.Tensor]:
        """What its update writes to."""
        return [self.tensor, *self.held.values()] if self.chunk.num_elements else []

    def enter(self, optimizer: Optimizer, numbers: "NumberCopies") -> None:
        """The optimizer has a state for `tensor`, if it has one for the parameter, and `tensor.grad` is set."""
        gradient = self.parameter.grad
        assert gradient is not None
        if self.tensor.grad is None or not self._comes_again(gradient):
            self.tensor.grad = self._part_of_gradient(gradient)
        state = optimizer.state.get(self.parameter)
        if state:
            optimizer.state[self.tensor] = self._filled(state, numbers)

    def _part_of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        if not isinstance(gradient, HostGradient):
            whole = gradient
        elif self.is_whole or gradient.stride() != self.parameter.stride():
            whole = gradient.whole()
        else:
            return gradient.part(self.chunk.start, self.chunk.stop)
        return part_of(_dense(whole, self.parameter), self.chunk, self.is_whole)

    def _filled(self, state: Mapping[str, Any], numbers: "NumberCopies") -> dict[str, Any]:
        if not self._state:
            self._state = dict(self.held)
        for key, form in self.schema.items():
            if form is None:
                numbers.add(self._state, key, state[key])
        return self._state

    def leave(self, optimizer: Optimizer) -> dict[str, Any]:
        """What the update has left in the optimizer's state is held once; gives the numbers.

        A gradient that a script has put in the place of the run's own is not held any longer.
        """
        gradient = self.parameter.grad
        if gradient is not None and not self._comes_again(gradient):
            self.tensor.grad = None
            self._gradient = None if isinstance(gradient, HostGradient) else (ref(gradient), gradient.data_ptr())
        state = optimizer.state.pop(self.tensor, {})
        if state is not self._state:
            check_state(optimizer, state, self.schema)
        for key, place in self.held.items():
            if state[key] is not place:
                place.copy_(state[key])
        return {key: state[key] for key, form in self.schema.items() if form is None}


@dataclass
class NumberCopies:
    """Numbers that go from one state to another. Those in tensors go together when `apply` is called."""

    _targets: list[torch.Tensor] = field(default_factory=list)
    _sources: list[torch.Tensor] = field(default_factory=list)

    def add(self, state: dict[str, Any], key: str, value: Any) -> None:
        there = state.get(key)
        if not isinstance(value, torch.Tensor):
            state[key] = value
        elif isinstance(there, torch.Tensor):
            self._targets.append(there)
            self._sources.append(value)
        else:
            state[key] = value.clone()

    def apply(self) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


@dataclass(frozen=True)
class TensorBatch:
    """Chunks that are journaled and updated together; `memory` is what their update writes to."""

    chunks: Sequence[ChunkTensor]
    memory: list[torch.Tensor]

    @classmethod
    def of(cls, chunks: Sequence[ChunkTensor]) -> "TensorBatch":
        return cls(chunks, [tensor for one in chunks for tensor in one.memory()])


def part_of(tensor: torch.Tensor, chunk: UpdateChunk, is_whole: bool) -> torch.Tensor:
    """What of a parameter, its gradient or its state belongs to a chunk."""
    return tensor.detach() if is_whole else flat(tensor.detach())[chunk.start : chunk.stop]


def check_state(optimizer: Optimizer, state: Mapping[str, Any], schema: Schema) -> None:
    """Raises if the optimizer keeps something else for a parameter than was found out."""
    if set(state) != set(schema):
        raise Misuse(
            f"{type(optimizer).__name__} keeps {sorted(state)} for a parameter, and {sorted(schema)} was expected: its "
            'update cannot be divided among workers. Start with strategy="replicated".'
        )


def _dense(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient, in memory like its parameter."""
    stride = parameter.stride()  # that of a tensor that is held once: dense
    if gradient.stride() == stride:
        return gradient
    return torch.empty_strided(parameter.shape, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
