"""An optimizer whose parameters are on GPUs: each worker has all of them, and on its GPU the state of its own chunks.

# Note [Two versions in the memory of the host]
# The state of all chunks also stands in memory that the workers of the host share, twice: the version that
# `optimizer.state` shows, and the one that the update under way writes. A worker makes its part of an update on its
# GPU, copies its new parameters and state into that memory, and marks its part as done; when all have, the two versions
# change places, and the parameters are gathered from GPU to GPU. So one worker alone can read all of the state, and one
# that is killed in the middle of an update takes nothing along: if its part is done, the host has it; if not, a
# survivor has the parameters as they were, and the host the state as it was, and makes that part again.
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.optim import Optimizer

from lockstep.errors import BadArgument, Misuse
from lockstep.strategies.sharded import plan
from lockstep.strategies.sharded.chunks import ChunkTensor, part_of
from lockstep.strategies.sharded.ledger import Progress, num_bytes, open_ledgers
from lockstep.strategies.sharded.offload import ParameterOffload
from lockstep.strategies.sharded.once import Form, OnceTensors, flat, hold_once, map_once
from lockstep.strategies.sharded.optimizer import ShardedOptimizer, unhooked_step
from lockstep.strategies.sharded.plan import Batching, UpdateChunk
from lockstep.strategies.sharded.rounds import ParameterRounds
from lockstep.wire import Wire
from lockstep.wire.cuda.pinned import pin

_UNCUT = Batching(sys.maxsize)
"""A worker has one chunk of each parameter, and one call of the optimizer updates them all."""


class GpuOptimizer(ShardedOptimizer):
    """See Note [Two versions in the memory of the host]."""

    def __init__(
        self, optimizer: Optimizer, names: Mapping[torch.Tensor, str], wire: Wire, offload: ParameterOffload | None
    ) -> None:
        """Collective. The host holds the optimizer's state afterwards, and the parameters if no `offload` does."""
        super().__init__(optimizer, names, wire)
        self._refuse_gaps()
        self._offload = offload
        self._looks = [_look_of(parameter) for parameter in self._owned]
        parameters = dict(zip(self._names, self._owned, strict=True))
        if offload is None:
            self._own_values = hold_once(wire, {name: Form.of(one) for name, one in parameters.items()}, parameters)
        forms = self._forms()
        self._state, self._next = hold_once(wire, forms, self._state_tensors()), map_once(wire, forms, {})
        self._show_state(self._with_state())
        self.is_pinned = True
        """Whether copies between the GPU and the memory of the host are as fast as they can be."""
        if self._owned[0].is_cuda:
            mine = (self._state, self._next) if offload is not None else (self._own_values, self._state, self._next)
            memories = [once.memory.shared for once in mine]
            self.is_pinned = all(pin(memory) for memory in memories)
            torch.cuda.empty_cache()  # whole state tensors that were this worker's own
        self._written: list[slice] = []
        self._is_restored = False
        self._counted: tuple[ParameterRounds, int, Counter[int]] | None = None
        self._deal()

    @property
    def _values(self) -> OnceTensors:
        """The parameters as the last update has left them."""
        return self._own_values if self._offload is None else self._offload.once

    def _divide(self, num_workers: int) -> None:
        sizes = [parameter.numel() for parameter in self._owned]
        divided = (plan.whole if self._by_tensor else plan.cut)(sizes, num_workers, _UNCUT)
        self._parts = [[chunk for batch in own for chunk in batch] for own in divided]
        """The chunks of each worker of this host."""
        self._chunks = [self._tensor_of(chunk) for chunk in self._parts[self._own]]
        self._is_on_gpu = False
        """Whether the chunks have the state on the GPU."""
        self._rounds = ParameterRounds(self.wire, self._own, self._owned, self._parts)
        self._ledgers = open_ledgers(self.wire, [num_bytes(1, ())] * num_workers, [1] * num_workers)
        self._places = self._standing()

    def _tensor_of(self, chunk: UpdateChunk) -> ChunkTensor:
        number = chunk.parameter
        return ChunkTensor(
            chunk, self._owned[number], self._group_of[number], self._schemas[number], self._by_tensor,
            part_of(self._owned[number], chunk, self._by_tensor),
            {key: torch.empty_like(home, device=form.device) for key, form, home in self._homes(self._state, chunk)},
        )  # fmt: skip

    def close(self) -> None:
        super().close()
        self._rounds.close()

    def needs_plan(self, wire: Wire) -> bool:
        return super().needs_plan(wire) or self._places != self._standing()

    def is_stale(self) -> bool:
        return super().is_stale() or self._looks != [_look_of(parameter) for parameter in self._owned]

    def look(self) -> bytes:
        """Every worker's parameters are its own: those that a script has changed differently are found here."""
        if self._next.written(self._next.views):
            raise Misuse(
                f"the script has written to a tensor that {type(self.optimizer).__name__}.state had before the last "
                "update. Under a sharded strategy on a GPU, optimizer.state has other tensors after each update: read "
                'it again, or start with strategy="replicated".'
            )
        self._written = self._state.written(self._state.views)
        changes = self._state.changed(self._written)
        if changes:
            self._is_on_gpu = False
        return hashlib.sha256(self._rounds.fingerprint()).digest() + self._state.digest(changes)

    def dissolve(self) -> None:
        """This worker has all of the state on its GPU. Not collective; afterwards nothing of this is used."""
        for number in self._with_state():
            state = self.optimizer.state[self._owned[number]]
            for key, form in self._schemas[number].items():
                if form is not None:
                    state[key] = state[key].to(form.device, copy=True)
        self.close()

    @property
    def updated_names(self) -> list[str]:
        """The parameters that the update under way changes."""
        return [self._names[number] for number in self._updated()]

    def num_views(self) -> Counter[int]:
        """How many tensors of this object show each storage."""
        empty: Sequence[ChunkTensor] = self.__dict__.get("_empty", ())
        if self._counted is None or self._counted[:2] != (self._rounds, len(empty)):
            views = [*(one.tensor for one in (*self._chunks, *empty)), *self._rounds.views()]
            found = {one._cdata: one for view in views for one in (view, view._base) if one is not None}
            self._counted = self._rounds, len(empty), Counter(one.untyped_storage()._cdata for one in found.values())
        return self._counted[2]

    # -- this worker's part ---------------------------------------------------------------------------------

    def begin_own(self) -> None:
        if not self._is_on_gpu:
            self._fetch(self._chunks)
            self._is_on_gpu = True
        self._enter(self._chunks)

    def end_own(self) -> None:
        self._leave(self._chunks)
        self._store(self._own, self._chunks)

    def finish_all(self) -> None:
        step = unhooked_step(self.optimizer)
        for member, part in enumerate(self._parts):
            if self._ledgers[member].progress(0, self._number) is not Progress.DONE:
                chunks = [self._tensor_of(chunk) for chunk in part]
                self._fetch(chunks)
                self._enter(chunks)
                try:
                    step(self.optimizer)
                except BaseException:
                    self.give_up()
                    raise
                self._leave(chunks)
                self._store(member, chunks)

    @torch.no_grad()
    def restore(self) -> None:
        """Reads the parameters from the host. What they were gathered from may be gone."""
        self._read(self._updated())
        self._is_restored = True

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """This worker's parameters are those that the last update has left. Not collective."""
        self._read(range(len(self._owned)))

    @torch.no_grad()
    def conclude(self) -> None:
        """Collective, unless it was restored: the parameters are gathered."""
        if not self._is_restored:
            self._gather()
        self._state.forget(self._written)
        self._state, self._next = self._next, self._state
        self._show_state(sorted({*self._with_state(), *(one for one in self._updated() if self._schemas[one])}))
        self._take_numbers()
        self._is_restored = False
        self._number += 1

    # -- between this worker and the host ---------------------------------------------------------------------

    def _homes(
        self, version: OnceTensors, chunk: UpdateChunk, *, seen: bool = False
    ) -> Iterator[tuple[str, Form, torch.Tensor]]:
        """What the host holds of a chunk's state; `seen`: as this worker's script sees it."""
        name = self._names[chunk.parameter]
        for key, form in self._schemas[chunk.parameter].items():
            if form is not None:
                whole = (version.views if seen else version.shared)[f"{name}/{key}"]
                yield key, form, part_of(whole, chunk, self._by_tensor)

    def _fetch(self, chunks: Sequence[ChunkTensor]) -> None:
        """The chunks have the state that this worker's script sees."""
        for one in chunks:
            for key, _, home in self._homes(self._state, one.chunk, seen=True):
                one.held[key].copy_(home, non_blocking=True)

    @torch.no_grad()
    def _store(self, member: int, chunks: Sequence[ChunkTensor]) -> None:
        """The chunks, which belong to a member, stand in the memory of the host as they are after the update."""
        for one in chunks:
            if one.chunk.num_elements:
                home = part_of(self._values.shared[self._names[one.chunk.parameter]], one.chunk, self._by_tensor)
                home.copy_(one.tensor, non_blocking=True)
                for key, _, home in self._homes(self._next, one.chunk):
                    home.copy_(one.held[key], non_blocking=True)
        self._synchronize()
        self._ledgers[member].mark(0, self._number, Progress.DONE)

    def _gather(self) -> None:
        members = self.wire.host_members
        if len(members) == self.wire.world.size:
            self._rounds.gather()
        elif len(members) > 1:  # a collective would be over all hosts
            self._read(self._updated())

    def _read(self, parameters: Iterable[int]) -> None:
        """The parameters are as the host holds them."""
        for number in parameters:
            flat(self._owned[number]).copy_(flat(self._values.shared[self._names[number]]), non_blocking=True)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._owned[0].is_cuda:
            torch.cuda.current_stream(self._owned[0].device).synchronize()

    def _standing(self) -> list[tuple[int, int]]:
        """Where the parameters stand: a script may put others in their place. Their memory may be another one."""
        return [(parameter.untyped_storage()._cdata, int(parameter.storage_offset())) for parameter in self._owned]

    def _refuse_gaps(self) -> None:
        for name, parameter in zip(self._names, self._owned, strict=True):
            if Form.of(parameter).stride != parameter.stride():
                raise BadArgument(
                    f"the elements of parameter {name} do not stand one after the other in memory: a sharded strategy "
                    "divides memory. Make it dense (parameter.data = parameter.data.contiguous()), or start with "
                    'strategy="replicated".'
                )


def _look_of(parameter: torch.Tensor) -> tuple[object, ...]:
    """What a chunk depends on."""
    return parameter.shape, parameter.stride(), parameter.dtype
