"""An optimizer whose parameters and state stand once, in memory that all workers of the host map."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.errors import Misuse
from lockstep.strategies.sharded import plan
from lockstep.strategies.sharded.chunks import ChunkTensor, TensorBatch, part_of
from lockstep.strategies.sharded.fused import KernelByBatches, is_fused
from lockstep.strategies.sharded.ledger import Progress, num_bytes, open_ledgers
from lockstep.strategies.sharded.once import OnceTensors, hold_once
from lockstep.strategies.sharded.optimizer import ShardedOptimizer, unhooked_step
from lockstep.strategies.sharded.plan import Batch, Batching, UpdateChunk
from lockstep.wire import Wire
from lockstep.wire.shared.once import return_freed_memory


class HostOptimizer(ShardedOptimizer):
    """A worker updates its batches where they stand; nothing is gathered. See Note [The journal] in ledger.py."""

    def __init__(
        self, optimizer: Optimizer, names: Mapping[torch.Tensor, str], parameters: OnceTensors, wire: Wire
    ) -> None:
        """Collective. The optimizer's state is held once afterwards."""
        super().__init__(optimizer, names, wire)
        self._parameters = parameters
        self._is_fused = is_fused(optimizer)
        self._state = hold_once(wire, self._forms(), self._state_tensors())
        self._show_state(self._with_state())
        self._written: tuple[list[slice], list[slice]] = [], []
        self._changes: tuple[list[slice], list[slice]] = [], []
        self._deal()

    def _divide(self, num_workers: int) -> None:
        self._batches = [
            [TensorBatch.of([self._tensor_of(chunk) for chunk in batch]) for batch in own]
            for own in self._divided(num_workers)
        ]
        sizes = [
            num_bytes(len(own), [[tensor.nbytes for tensor in batch.memory] for batch in own]) for own in self._batches
        ]
        self._ledgers = open_ledgers(self.wire, sizes, [len(own) for own in self._batches])
        self._batch_of = {
            id(one.tensor): number for number, batch in enumerate(self._batches[self._own]) for one in batch.chunks
        }

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

    def finish_all(self) -> None:
        """Makes what the workers of this host have not done of the update. See Note [The journal] in ledger.py."""
        step = unhooked_step(self.optimizer)
        numbers = dict(self._numbers)
        for member, batches in enumerate(self._batches):
            for number in range(len(batches)):
                if self._ledgers[member].progress(number, self._number) is not Progress.DONE:
                    self._update(step, member, number)
        self._numbers = numbers

    def restore(self) -> None:
        """What the others have made stands where this worker reads it."""

    def conclude(self) -> None:
        """All workers have made their part: `optimizer.state` is whole, and views show the new values."""
        new = [number for number in self._updated() if self._schemas[number] and not self._has_state(number)]
        self._show_state(new)
        self._take_numbers()
        self._parameters.forget(self._written[0])
        self._state.forget(self._written[1])
        self._number += 1
        if new:
            return_freed_memory()  # the state that the optimizer has made itself

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

    def _publish(self, batch: Sequence[ChunkTensor]) -> None:
        """What the scripts have changed, all workers see from now on."""
        of_parameters, of_state = self._changes
        for one in batch if of_parameters or of_state else ():
            chunk, name = one.chunk, self._names[one.chunk.parameter]
            self._parameters.publish(name, chunk.start, chunk.stop, of_parameters)
            for key, held in one.held.items():
                stop = held.numel() if self._by_tensor else chunk.stop
                self._state.publish(f"{name}/{key}", chunk.start, stop, of_state)
