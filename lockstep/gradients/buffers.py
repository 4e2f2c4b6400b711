"""Buffers (BatchNorm's statistics, counters): every lane starts from the same values; afterwards they are averaged.

# Note [Which buffers changed]
# A language model may hold large constant buffers (masks), which must not be copied or sent at every step. A buffer
# counts as changed in a lane if it was replaced, if its version counter moved, or if it belongs to a
# normalisation layer in training mode, whose native kernel writes without moving the counter. Others write so too:
# layers that call F.batch_norm themselves, observers of quantisation, code that writes to `.data`. So a small buffer on
# the CPU is also compared by its value. A large one, or one on a GPU, where that makes the host wait, is compared in
# the first step only: what was written so then counts as written by every lane of a module in training mode.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _NormBase

from lockstep.data.structure import versions_of
from lockstep.errors import Misuse
from lockstep.gradients.buffer_sum import BufferGroup, buffer_groups, copy_together
from lockstep.lanes import Fold, Reduction
from lockstep.wire import Wire

MOST_COMPARED = 64 * 1024
"""Elements up to which a buffer is compared by value in every step. See Note [Which buffers changed]."""

COMPARED_ALWAYS = ("cpu",)
"""Devices on which that costs no wait."""

BufferKey = tuple[int, str]
"""A module, by its id, and the name of a buffer in it."""


@dataclass
class BufferSlot:
    """A buffer by name: the module that owns it may replace the tensor, so it is looked up each time."""

    name: str
    owner: torch.nn.Module
    key: str
    is_silent: bool
    """Whether it is written without a sign: known of torch's own layers, else seen where it cannot be looked for."""

    def read(self) -> torch.Tensor:
        tensor = self.owner._buffers.get(self.key)
        if tensor is None:
            raise Misuse(
                f"buffer {self.name} was taken away. Inside a lane it cannot be: the other lanes start from its value. "
                "Outside of run.lanes it can: call run.replicate(model) again afterwards."
            )
        return tensor

    @property
    def identity(self) -> BufferKey:
        return id(self.owner), self.key

    def is_statistic(self) -> bool:
        return self.is_silent and self.owner.training


@dataclass
class BufferStart:
    """The value with which every lane of a step starts, and how to see whether a lane changed it."""

    tensor: torch.Tensor
    value: torch.Tensor
    version: list[int]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "BufferStart":
        """The value is a copy, which outlives what a lane writes."""
        return cls(tensor, tensor.detach().clone(), versions_of(tensor))

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of the value can hold this tensor's."""
        mine = self.value
        return (mine.shape, mine.dtype, mine.device) == (tensor.shape, tensor.dtype, tensor.device)


class LaneBuffers:
    """The buffers of all replicated models through the lanes of a step."""

    def __init__(self, modules: Sequence[torch.nn.Module], names: Sequence[str]) -> None:
        self.slots = _once(modules, names)
        self._starts = [BufferStart.of(slot.read()) for slot in self.slots]
        self._lanes: list[dict[int, torch.Tensor]] = []
        self._is_first_step = True
        """Whether no lane of a step before has shown which buffers are written."""

    @torch.no_grad()
    def begin_step(self) -> None:
        """Notes the values with which all lanes start, and with which the step starts again if it must."""
        self._is_first_step = self._is_first_step and not self._lanes
        self._lanes = []
        again = []
        for index in self._changed_now():
            tensor, start = self.slots[index].read(), self._starts[index]
            if start.fits(tensor):
                again.append(index)
                start.tensor, start.version = tensor, versions_of(tensor)
            else:
                self._starts[index] = BufferStart.of(tensor)
        copy_together([self._starts[i].value for i in again], [self._starts[i].tensor for i in again])

    @torch.no_grad()
    def rewind(self) -> None:
        """Everything is as it was when the step began."""
        self._lanes = []
        self._start_again(list(self._changed_now()))

    @torch.no_grad()
    def end_lane(self, last: bool) -> None:
        """Keeps what the lane wrote; unless it was the last one here, puts the starting values back."""
        found = self._found()
        if last:
            self._put_tensors_back(found)
        else:
            found = _copied(found)
            self._start_again(list(found))
        self._lanes.append(found)

    @torch.no_grad()
    def written_values(self) -> dict[int, torch.Tensor]:
        """Copies of the buffers that have changed since `begin_step`. Steps that are never redone do not call that."""
        return _copied(self._found())

    @torch.no_grad()
    def set_written(self, values: Mapping[int, torch.Tensor]) -> None:
        """Buffers are as they were when `written_values` gave these; graphs made since then stay valid."""
        indices = sorted({*self._found(), *values})
        self._put_tensors_back(indices)
        places = [self._starts[index].tensor.data for index in indices]  # of which no graph counts the versions
        copy_together(places, [values.get(index, self._starts[index].value) for index in indices])

    def written(self) -> list[int]:
        """Which buffers the lane under way has written to so far, by their signs: no value is looked at."""
        pairs = enumerate(zip(self.slots, self._starts, strict=True))
        return [index for index, (slot, start) in pairs if _shows_change(slot, start)]

    def replaced(self) -> list[str]:
        """Which buffers the lane under way has put another tensor in place of."""
        return [
            slot.name for slot, start in zip(self.slots, self._starts, strict=True) if slot.read() is not start.tensor
        ]

    def put_back(self) -> None:
        """Where the lane under way has replaced a buffer, the tensor from before is there again."""
        self._put_tensors_back(range(len(self.slots)))

    def replayed(self, written: Sequence[int]) -> None:
        """A graph has written to these buffers, which their version counters do not show."""
        for index in written:
            self._starts[index].version = [-1]

    @property
    def places(self) -> set[BufferKey]:
        """Where they are."""
        return {slot.identity for slot in self.slots}

    def changed(self) -> list[bool]:
        return [any(index in written for written in self._lanes) for index in range(len(self.slots))]

    @torch.no_grad()
    def average(
        self, wire: Wire, reduction: Reduction, weights: Sequence[float], lowest: int, changed: Sequence[bool]
    ) -> None:
        """Collective. Floating buffers become the weighted mean over lanes, added in tree order.

        The others take the values of lane `lowest`. See Note [Counters in the sum] in buffer_sum.py.
        """
        fold = reduction.folds[wire.world.rank]
        starts = [start.value for start in self._starts]
        for group in buffer_groups(starts, changed):
            roots = self._folded(group, starts, fold, weights, lowest)
            total = roots[0] if roots else torch.empty_like(group.lane_part(starts, {}, 1.0, is_lowest=False))
            wire.reducer.reduce(reduction, roots, total)
            group.write(total, [start.tensor for start in self._starts])

    def _found(self) -> dict[int, torch.Tensor]:
        """What the lane under way has written, where it stands."""
        found = {index: self.slots[index].read().detach() for index in self._changed_now()}
        for index, value in found.items():
            _refuse_other_shape(self.slots[index], value, self._starts[index].value)
        return found

    def _changed_now(self) -> Iterator[int]:
        """Which buffers have changed since the step began, or since they were put back."""
        for index, (slot, start) in enumerate(zip(self.slots, self._starts, strict=True)):
            if slot.is_statistic() or self._moved(slot, start):
                yield index

    def _put_tensors_back(self, indices: Iterable[int]) -> None:
        for index in indices:
            slot = self.slots[index]
            slot.owner._buffers[slot.key] = self._starts[index].tensor

    def _start_again(self, indices: Sequence[int]) -> None:
        """These buffers have the values with which the step began."""
        self._put_tensors_back(indices)
        starts = [self._starts[index] for index in indices]
        copy_together([start.tensor for start in starts], [start.value for start in starts])
        copied = {id(start.tensor) for start in starts}
        for start in self._starts:  # two modules may hold one tensor
            if id(start.tensor) in copied:
                start.version = versions_of(start.tensor)

    def _moved(self, slot: BufferSlot, start: BufferStart) -> bool:
        """See Note [Which buffers changed]."""
        if _shows_change(slot, start):
            return True
        always = start.tensor.device.type in COMPARED_ALWAYS and start.tensor.numel() <= MOST_COMPARED
        if not (always or self._is_first_step) or not _differs(start.tensor, start.value):
            return False
        slot.is_silent |= not always
        return True

    def _folded(
        self,
        group: BufferGroup,
        starts: Sequence[torch.Tensor],
        program: Fold,
        weights: Sequence[float],
        lowest: int,
    ) -> list[torch.Tensor]:
        stack: list[torch.Tensor] = []
        lanes = zip(program.lanes, self._lanes, program.merges, weights, strict=True)
        for lane, written, merges, weight in lanes:
            stack.append(group.lane_part(starts, written, weight, is_lowest=lane == lowest))
            for _ in range(merges):
                top = stack.pop()
                stack[-1].add_(top)
        return stack


def _copied(tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    copies = {index: torch.empty_like(tensor) for index, tensor in tensors.items()}
    copy_together(list(copies.values()), list(tensors.values()))
    return copies


def buffer_places(modules: Sequence[torch.nn.Module]) -> set[BufferKey]:
    """Where all buffers of the models are."""
    return {slot.identity for slot in _once(modules, [""] * len(modules))}


def refuse_new_buffers(modules: Sequence[torch.nn.Module], names: Sequence[str], known: set[BufferKey]) -> None:
    """After the lanes: refuses a buffer of the models that was not there before them."""
    for slot in _once(modules, names):
        if slot.identity not in known:
            raise Misuse(
                f"buffer {slot.name} was first made inside run.lanes: every lane must start from the same value, "
                "and it had none. Give it one when the model is made, or run one forward pass before run.lanes."
            )


def _once(modules: Sequence[torch.nn.Module], names: Sequence[str]) -> list[BufferSlot]:
    """All buffers. Models may have a part in common: its buffers count once."""
    found: dict[BufferKey, BufferSlot] = {}
    for module, name in zip(modules, names, strict=True):
        owners = dict(module.named_modules(remove_duplicate=False))
        for path, _ in module.named_buffers(remove_duplicate=False):
            prefix, _, key = path.rpartition(".")
            is_native = isinstance(owners[prefix], _NormBase) and key.startswith("running_")
            slot = BufferSlot(f"{name}{path}", owners[prefix], key, is_native)
            found.setdefault(slot.identity, slot)
    return list(found.values())


def _shows_change(slot: BufferSlot, start: BufferStart) -> bool:
    tensor = slot.read()
    return tensor is not start.tensor or versions_of(tensor) != start.version


def _differs(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a buffer has another value: not a number is the same as itself."""
    if tensor.layout != torch.strided:
        return False
    return not torch.equal(tensor, value) and not torch.equal(_bytes_of(tensor), _bytes_of(value))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten().view(torch.uint8)


def _refuse_other_shape(slot: BufferSlot, written: torch.Tensor, start: torch.Tensor) -> None:
    if written.shape != start.shape or written.dtype != start.dtype:
        raise Misuse(
            f"buffer {slot.name} changed from {start.dtype} {list(start.shape)} to {written.dtype} "
            f"{list(written.shape)} inside a lane: lanes can only be averaged if they keep shape and dtype. "
            "Change it outside run.lanes, where it is the same on every worker."
        )
