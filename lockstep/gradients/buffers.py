"""Buffers (BatchNorm's statistics, counters): every lane starts from the same values; afterwards they are averaged.

# Note [Which buffers changed]
# A language model may hold large constant buffers (masks), which must not be copied or sent at every step. A buffer
# counts as changed in a lane if it was replaced, if its version counter moved, or if it belongs to a
# normalisation layer in training mode, whose native kernel writes without moving the counter. Others write so too:
# layers that call F.batch_norm themselves, observers of quantisation, whoever writes to `.data`. So a small buffer on
# the CPU is also compared by its value. On a GPU that makes the host wait, so it is done in the first step only: what
# was written so then counts as written by every lane of a module in training mode.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from lockstep.chance import fold
from lockstep.errors import Misuse
from lockstep.lanes import Fold, Reduction
from lockstep.wire import Wire, broadcast
from lockstep.wire.transport import DATA

MOST_COMPARED = 64 * 1024
"""Elements up to which a buffer is compared by value. See Note [Which buffers changed]."""

COMPARED_ALWAYS = ("cpu",)
"""Devices on which that costs no wait."""

MOST_COUNTED = 64
"""Elements up to which a buffer that is not averaged is taken for a counter, and compared by value."""


@dataclass
class Slot:
    """A buffer by name: the module that owns it may replace the tensor, so it is looked up each time."""

    name: str
    owner: torch.nn.Module
    key: str
    is_silent: bool = False
    """Whether it was seen to be written without a sign, where that cannot be looked for each time."""

    def read(self) -> torch.Tensor:
        tensor = self.owner._buffers[self.key]
        assert tensor is not None
        return tensor

    def is_statistic(self) -> bool:
        native = isinstance(self.owner, _NormBase) and self.key.startswith("running_")
        return (native or self.is_silent) and self.owner.training


@dataclass
class Start:
    """The value with which every lane of a step starts, and how to see whether a lane changed it."""

    tensor: torch.Tensor
    value: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Start":
        """The value is a copy, which outlives what a lane writes."""
        return cls(tensor, tensor.detach().clone(), tensor._version)


class Buffers:
    """The buffers of all replicated models through the lanes of a step."""

    def __init__(self, modules: Sequence[torch.nn.Module], names: Sequence[str]) -> None:
        self.slots = _once(slot for module, name in zip(modules, names, strict=True) for slot in _slots(module, name))
        self._starts = [Start.of(slot.read()) for slot in self.slots]
        self._lanes: list[dict[int, torch.Tensor]] = []
        self._steps_begun = 0

    def begin_step(self) -> None:
        """Notes the values with which all lanes start, and with which the step starts again if it must."""
        self._lanes = []
        self._steps_begun += 1
        for index, (slot, start) in enumerate(zip(self.slots, self._starts, strict=True)):
            if slot.is_statistic() or self._moved(slot, start):
                self._starts[index] = Start.of(slot.read())

    @torch.no_grad()
    def rewind(self) -> None:
        """Everything is as it was when the step began."""
        self._lanes = []
        for slot, start in zip(self.slots, self._starts, strict=True):
            if slot.is_statistic() or self._moved(slot, start):
                slot.owner._buffers[slot.key] = start.tensor
                start.tensor.copy_(start.value)
                start.version = start.tensor._version

    @torch.no_grad()
    def end_lane(self, last: bool) -> None:
        """Keeps what the lane wrote; unless it was the last one here, puts the starting values back."""
        written = {}
        for index, (slot, start) in enumerate(zip(self.slots, self._starts, strict=True)):
            if slot.is_statistic() or self._moved(slot, start):
                found = slot.read().detach()
                _refuse_other_shape(slot, found, start.value)
                slot.owner._buffers[slot.key] = start.tensor
                written[index] = found if last else found.clone()
                if not last:
                    start.tensor.copy_(start.value)
                    start.version = start.tensor._version
        self._lanes.append(written)

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
        for slot, start in zip(self.slots, self._starts, strict=True):
            slot.owner._buffers[slot.key] = start.tensor

    def replayed(self, written: Sequence[int]) -> None:
        """A graph has written to these buffers, which their version counters do not tell."""
        for index in written:
            self._starts[index].version = -1

    def changed(self) -> list[bool]:
        return [any(index in written for written in self._lanes) for index in range(len(self.slots))]

    def counters(self, rank: int) -> int:
        """A fingerprint of what the first lane wrote to counters; a number of its own for a worker without lanes."""
        if not self._lanes:
            return -1 - rank
        small = {i: v for i, v in self._lanes[0].items() if not _is_averaged(v) and v.numel() <= MOST_COUNTED}
        return fold(0, *(f"{i}={values}" for i, values in zip(small, _listed(list(small.values())), strict=True)))

    @torch.no_grad()
    def average(self, wire: Wire, reduction: Reduction, weights: Sequence[float], changed: Sequence[bool]) -> None:
        """Collective. Floating buffers become the weighted mean over lanes, added in tree order."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, start in enumerate(self._starts):
            if changed[index] and _is_averaged(start.value):
                by_dtype.setdefault(start.value.dtype, []).append(index)
        for indices in by_dtype.values():
            roots = self._folded(indices, reduction.folds[wire.world.rank], weights)
            total = roots[0] if roots else torch.empty_like(self._flat(indices, {}))
            wire.reducer.reduce(reduction, roots, total)
            self._write(indices, total)

    @torch.no_grad()
    def advance(self, wire: Wire, source: int, changed: Sequence[bool], agreed: bool) -> None:
        """Other buffers (counters) take the value of the lowest lane, which worker `source` carries.

        Collective, unless workers have `agreed` that their first lanes all left the same.
        """
        indices = [i for i, start in enumerate(self._starts) if changed[i] and not _is_averaged(start.value)]
        if not indices:
            return
        first = self._lanes[0] if self._lanes else {}
        values = [first.get(index, self._starts[index].value) for index in indices]
        flat = torch.cat([value.contiguous().flatten().view(torch.uint8) for value in values])
        if not agreed or any(value.numel() > MOST_COUNTED for value in values):
            flat = flat.cpu()
            broadcast(wire.transport, flat, source, DATA)
        pieces = flat.split([value.nbytes for value in values])
        for index, piece in zip(indices, pieces, strict=True):
            self._write([index], piece.clone().view(self._starts[index].value.dtype))

    def _moved(self, slot: Slot, start: Start) -> bool:
        """See Note [Which buffers changed]."""
        if _shows_change(slot, start):
            return True
        always = start.tensor.device.type in COMPARED_ALWAYS
        if not (always or self._steps_begun <= 1) or not _differs(start.tensor, start.value):
            return False
        slot.is_silent = not always
        return True

    def _folded(self, indices: Sequence[int], program: Fold, weights: Sequence[float]) -> list[torch.Tensor]:
        stack: list[torch.Tensor] = []
        for written, merges, weight in zip(self._lanes, program.merges, weights, strict=True):
            stack.append(self._flat(indices, written).mul_(weight))
            for _ in range(merges):
                top = stack.pop()
                stack[-1].add_(top)
        return stack

    def _flat(self, indices: Sequence[int], written: dict[int, torch.Tensor]) -> torch.Tensor:
        return torch.cat([written.get(index, self._starts[index].value).flatten() for index in indices])

    def _write(self, indices: Sequence[int], flat: torch.Tensor) -> None:
        pieces = flat.split([self._starts[index].value.numel() for index in indices])
        for index, piece in zip(indices, pieces, strict=True):
            self._starts[index].tensor.copy_(piece.view_as(self._starts[index].tensor))


def _once(slots: Iterable[Slot]) -> list[Slot]:
    """Models may have a part in common: its buffers count once."""
    found: dict[int, Slot] = {}
    for slot in slots:
        found.setdefault(id(slot.read()), slot)
    return list(found.values())


def _slots(module: torch.nn.Module, name: str) -> list[Slot]:
    owners = dict(module.named_modules())
    found = []
    for path, _ in module.named_buffers():
        owner, _, key = path.rpartition(".")
        found.append(Slot(f"{name}{path}", owners[owner], key))
    return found


def _listed(values: Sequence[torch.Tensor]) -> list[Any]:
    """The values as Python has them; what is on a GPU comes together, since each look would wait for it."""
    if not any(value.is_cuda for value in values):
        return [value.tolist() for value in values]
    flat = torch.cat([value.contiguous().flatten().view(torch.uint8) for value in values]).cpu()
    pieces = flat.split([value.nbytes for value in values])
    return [piece.clone().view(v.dtype).view(v.shape).tolist() for piece, v in zip(pieces, values, strict=True)]


def _is_averaged(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _shows_change(slot: Slot, start: Start) -> bool:
    tensor = slot.read()
    return tensor is not start.tensor or tensor._version != start.version


def _differs(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a small buffer has another value: not a number is the same as itself."""
    if tensor.layout != torch.strided or tensor.numel() > MOST_COMPARED:
        return False
    return not torch.equal(tensor, value) and not torch.equal(_bytes_of(tensor), _bytes_of(value))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten().view(torch.uint8)


def _refuse_other_shape(slot: Slot, written: torch.Tensor, start: torch.Tensor) -> None:
    if written.shape != start.shape or written.dtype != start.dtype:
        raise Misuse(
            f"buffer {slot.name} changed from {start.dtype} {list(start.shape)} to {written.dtype} "
            f"{list(written.shape)} inside a lane: lanes can only be averaged if they keep shape and dtype. "
            "Change it outside run.lanes, where it is the same on every worker."
        )
