"""An optimizer of the user whose update is divided among the workers of a host.

# Note [The user's own optimizer]
# The optimizer stays the user's object, and its own `step` makes every update. For the time of a batch its groups hold
# chunks instead of parameters, and its state has the chunks' state: views of memory that the host holds once. Between
# updates the groups hold the parameters, and `optimizer.state` has whole tensors, as without sharding.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch.optim import Optimizer

from lockstep.errors import BadArgument, Misuse
from lockstep.optim import LAMB, LARS
from lockstep.strategies.sharded import plan
from lockstep.strategies.sharded.chunks import ChunkTensor, Schema, TensorBatch, check_state, part_of, take_numbers
from lockstep.strategies.sharded.fused import KernelByBatches, is_fused
from lockstep.strategies.sharded.ledger import Ledger, Progress, num_bytes, open_ledgers, release_ledger
from lockstep.strategies.sharded.once import Form, OnceTensors, hold_once
from lockstep.strategies.sharded.plan import Batch, Batching, UpdateChunk
from lockstep.wire import Wire
from lockstep.wire.shared.once import return_freed_memory

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


class ShardedOptimizer:
    """Who updates what of one optimizer, in one generation.

    The order of calls in an update is: `look`; after the first barrier `begin_own`, the optimizer's own `step`,
    `end_own`; after the second, `conclude`. `finish_all` is called while a generation forms.
    """

    def __init__(
        self, optimizer: Optimizer, names: Mapping[torch.Tensor, str], parameters: OnceTensors, wire: Wire
    ) -> None:
        """Collective. The optimizer's state is held once afterwards."""
        self.optimizer, self.wire = optimizer, wire
        self._parameters = parameters
        self._group_of, self._owned = _grouped(optimizer)
        self._names = [names[parameter] for parameter in self._owned]
        self._by_tensor = type(optimizer) not in ELEMENTWISE
        self._is_fused = is_fused(optimizer)
        self._schemas = _schemas(optimizer)
        self._state = hold_once(wire, self._forms(), self._state_tensors())
        self._show_state([number for number in range(len(self._owned)) if self._has_state(number)])
        self._written: tuple[list[slice], list[slice]] = [], []
        self._changes: tuple[list[slice], list[slice]] = [], []
        self._ledgers: list[Ledger] = []
        self._deal()

    def _deal(self) -> None:
        """Collective. Divides the elements among the workers of this host."""
        members = self.wire.host_members
        self._own = members.index(self.wire.world.rank)
        self._batches = [
            [TensorBatch.of([self._tensor_of(chunk) for chunk in batch]) for batch in own]
            for own in self._divided(len(members))
        ]
        sizes = [
            num_bytes(len(own), [[tensor.nbytes for tensor in batch.memory] for batch in own]) for own in self._batches
        ]
        self._ledgers = open_ledgers(self.wire, sizes, [len(own) for own in self._batches])
        self._batch_of = {
            id(one.tensor): number for number, batch in enumerate(self._batches[self._own]) for one in batch.chunks
        }
        self._number = 1
        self._groups: list[list[torch.Tensor]] | None = None
        """The parameters of each group, while the groups hold chunks."""
        self._numbers: dict[int, dict[str, Any]] = {}

    def _divided(self, num_workers: int) -> list[list[Batch]]:
        """The batches of each worker of this host."""
        sizes = [parameter.numel() for parameter in self._owned]
        batching = self._batching()
        if self._by_tensor:
            return plan.whole(sizes, num_workers, batching)
        if torch.get_num_threads() > 1:  # see Note [Cuts that no kernel notices] in plan.py
            return plan.whole(sizes, num_workers, batching, with_empty=True)
        return plan.cut(sizes, num_workers, batching)

    def _batching(self) -> Batching:
        """Where one kernel updates batches, each stands in one call of it: a group, a dtype."""
        if not self._is_fused:
            return plan.ALIKE
        kinds = list(zip(self._group_of, (parameter.dtype for parameter in self._owned), strict=True))
        return Batching(plan.KERNEL_ELEMENTS, [kinds.index(kind) for kind in kinds])

    def _tensor_of(self, chunk: UpdateChunk) -> ChunkTensor:
        number, name = chunk.parameter, self._names[chunk.parameter]
        return ChunkTensor(
            chunk, self._owned[number], self._group_of[number], self._schemas[number], self._by_tensor,
            part_of(self._parameters.shared[name], chunk, self._by_tensor),
            {key: part_of(self._state.shared[f"{name}/{key}"], chunk, self._by_tensor) for key in self._held(number)},
        )  # fmt: skip

    def follow(self, wire: Wire) -> None:
        """Collective. The same memory, divided among the workers of another generation."""
        self.close()
        self.wire = wire
        self._deal()

    def close(self) -> None:
        """No update of it is under way, or will be in this generation."""
        release_ledger(self.wire, self._ledgers[self._own])

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

    def look(self) -> bytes:
        """Notes what this worker's script has changed since the last update; gives a digest of it."""
        self._written = self._parameters.written(self._names), self._state.written(self._state.views)
        self._changes = self._parameters.changed(self._written[0]), self._state.changed(self._written[1])
        return self._parameters.digest(self._changes[0]) + self._state.digest(self._changes[1])

    # -- this worker's part ---------------------------------------------------------------------------------

    def begin_own(self) -> None:
        """Updates this worker's batches, all but the last, which waits for `optimizer.step` itself."""
        step, last = unhooked_step(self.optimizer), len(self._batches[self._own]) - 1
        if self._can_update_together():
            self._update_together(step, last)
        else:
            for number in range(last):
                self._update(step, self._own, number)
        if last >= 0:
            self._begin(self._own, last)
        else:
            self._enter(())

    def end_own(self) -> None:
        """`optimizer.step` has updated the last batch."""
        last = len(self._batches[self._own]) - 1
        if last >= 0:
            self._end(self._own, last)
        else:
            self._leave(())

    def begin_nothing(self) -> None:
        """Others have made the update of this worker too; `optimizer.step` advances this worker's numbers."""
        self._enter(self._empty)

    def end_nothing(self) -> None:
        self._leave(self._empty)

    @cached_property
    def _empty(self) -> list[ChunkTensor]:
        """See Note [Empty chunks] in plan.py."""
        empty = [] if self._by_tensor else [UpdateChunk(number, 0, 0) for number in range(len(self._owned))]
        return [self._tensor_of(chunk) for chunk in empty]

    def finish_all(self) -> None:
        """Makes what the workers of this host have not done of the update. See Note [The journal] in ledger.py."""
        step = unhooked_step(self.optimizer)
        numbers = dict(self._numbers)
        for member, batches in enumerate(self._batches):
            for number in range(len(batches)):
                if self._ledgers[member].progress(number, self._number) is not Progress.DONE:
                    self._update(step, member, number)
        self._numbers = numbers

    def conclude(self) -> None:
        """All workers have made their part: `optimizer.state` is whole, and views show the new values."""
        updated = [number for number, parameter in enumerate(self._owned) if parameter.grad is not None]
        new = [number for number in updated if self._schemas[number] and not self._has_state(number)]
        self._show_state(new)
        for number, values in self._numbers.items():
            take_numbers(self.optimizer.state[self._owned[number]], values)
        self._parameters.forget(self._written[0])
        self._state.forget(self._written[1])
        self._numbers = {}
        self._number += 1
        if new:
            return_freed_memory()  # the state that the optimizer has made itself

    def give_up(self) -> None:
        """The groups hold the parameters, whatever has happened."""
        if self._groups is not None:
            self._restore_groups()

    # -- one batch ------------------------------------------------------------------------------------------

    def _can_update_together(self) -> bool:
        """Whether the kernel updates memory that is held once: in its first update an optimizer makes its own state."""
        updated = (number for number, parameter in enumerate(self._owned) if parameter.grad is not None)
        is_there = (self._has_state(number) for number in updated if self._schemas[number])
        return self._is_fused and is_fused(self.optimizer) and all(is_there)

    def _update_together(self, step: Callable[[Optimizer], Any], num_batches: int) -> None:
        """Updates this worker's first batches. See Note [One call, many batches] in fused.py."""
        chunks = [one for batch in self._batches[self._own][:num_batches] for one in batch.chunks]
        self._enter(chunks)
        try:
            with KernelByBatches(self._batch_of, self._updating):
                step(self.optimizer)
        except BaseException:
            self.give_up()
            raise
        self._leave(chunks)
        self._publish_rest(num_batches)

    def _publish_rest(self, num_batches: int) -> None:
        """Batches that the kernel was not given have no gradient; a script may have changed them nevertheless."""
        for number, batch in enumerate(self._batches[self._own][:num_batches]):
            if self._ledgers[self._own].progress(number, self._number) is Progress.UNTOUCHED:
                if any(one.is_updated for one in batch.chunks):
                    raise Misuse(
                        f"{type(self.optimizer).__name__} has made an update without its fused kernel: the run cannot "
                        'go on. Make it with fused=False, or start with strategy="replicated".'
                    )
                with self._updating(number):
                    pass

    @contextmanager
    def _updating(self, number: int) -> Iterator[None]:
        """Around the update of one of this worker's batches."""
        assert self._ledgers[self._own].progress(number, self._number) is Progress.UNTOUCHED
        self._prepare(self._own, number)
        yield
        self._ledgers[self._own].mark(number, self._number, Progress.DONE)

    def _update(self, step: Callable[[Optimizer], Any], member: int, number: int) -> None:
        self._begin(member, number)
        try:
            step(self.optimizer)
        except BaseException:
            self.give_up()
            raise
        self._end(member, number)

    def _begin(self, member: int, number: int) -> None:
        self._prepare(member, number)
        self._enter(self._batches[member][number].chunks)

    def _prepare(self, member: int, number: int) -> None:
        """The batch can be put back if its update is cut off. See Note [The journal] in ledger.py."""
        ledger, batch = self._ledgers[member], self._batches[member][number]
        if ledger.progress(number, self._number) is Progress.BEGUN:
            ledger.read(number, batch.memory)
        if len(self._ledgers) > 1:  # else nobody would read it
            ledger.write(number, batch.memory)
        ledger.mark(number, self._number, Progress.BEGUN)
        self._publish(batch.chunks)

    def _end(self, member: int, number: int) -> None:
        self._leave(self._batches[member][number].chunks)
        self._ledgers[member].mark(number, self._number, Progress.DONE)

    def _enter(self, batch: Sequence[ChunkTensor]) -> None:
        """See Note [The user's own optimizer]."""
        assert self._groups is None
        groups = self.optimizer.param_groups
        self._groups = [group["params"] for group in groups]
        for group in groups:
            group["params"] = []
        for one in batch:
            if one.is_updated:
                one.enter(self.optimizer)
                groups[one.group]["params"].append(one.tensor)

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

    def _publish(self, batch: Sequence[ChunkTensor]) -> None:
        """What the scripts have changed, all workers see from now on."""
        of_parameters, of_state = self._changes
        for one in batch if of_parameters or of_state else ():
            chunk, name = one.chunk, self._names[one.chunk.parameter]
            self._parameters.publish(name, chunk.start, chunk.stop, of_parameters)
            for key, held in one.held.items():
                stop = held.numel() if self._by_tensor else chunk.stop
                self._state.publish(f"{name}/{key}", chunk.start, stop, of_state)

    # -- the state between updates ----------------------------------------------------------------------------

    def _held(self, parameter: int) -> list[str]:
        return [key for key, form in self._schemas[parameter].items() if form is not None]

    def _has_state(self, parameter: int) -> bool:
        return bool(self.optimizer.state.get(self._owned[parameter]))

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
            kind = (number, form if type(optimizer) not in ELEMENTWISE else form.dtype)
            if kind not in found:
                found[kind] = _state_after_update(optimizer, group, _stand_in(optimizer, form))
            schemas.append(_schema(optimizer, found[kind], form))
    return schemas


def _stand_in(optimizer: Optimizer, form: Form) -> torch.Tensor:
    """A tensor whose update creates the same state: of two elements, or, if the shape matters, like the parameter."""
    if type(optimizer) in ELEMENTWISE:
        return torch.zeros(2, dtype=form.dtype)
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype).zero_()


def _state_after_update(optimizer: Optimizer, group: Mapping[str, Any], tensor: torch.Tensor) -> dict[str, Any]:
    other = object.__new__(type(optimizer))
    other.__dict__.update(vars(optimizer), param_groups=[{**group, "params": [tensor]}], state=defaultdict(dict))
    tensor.grad = torch.zeros_like(tensor)
    unhooked_step(optimizer)(other)
    return dict(other.state[tensor])


def _schema(optimizer: Optimizer, state: Mapping[str, Any], form: Form) -> Schema:
    if type(optimizer) in ELEMENTWISE:  # the stand-in has two elements in one dimension
        return {key: replace(form, dtype=value.dtype) if _has_elements(value) else None for key, value in state.items()}
    return {key: Form.of(value) for key, value in state.items()}


def _has_elements(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1
