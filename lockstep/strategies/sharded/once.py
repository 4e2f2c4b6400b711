"""Tensors that the workers of a host hold once: where each stands in memory that all of them map."""

import ctypes
import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.errors import Disagreement
from lockstep.gradients.layout import dense_stride
from lockstep.wire import Wire
from lockstep.wire.exchange import exchange_texts
from lockstep.wire.shared.once import PAGE_BYTES, OnceMemory
from lockstep.wire.shared.segments import allocate

TOKEN_BYTES = 8
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Form:
    """What a tensor looks like: dense, perhaps not contiguous. `device` is where a worker that updates it has it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = CPU

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        return cls(tuple(tensor.shape), dense_stride(tensor), tensor.dtype, tensor.device)

    @property
    def num_bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


def offsets(forms: Sequence[Form]) -> list[int]:
    """Where each of the tensors begins, each at a page of its own behind the first, and where the last one ends."""
    found = [PAGE_BYTES]
    for form in forms:
        found.append(found[-1] + -(-form.num_bytes // PAGE_BYTES) * PAGE_BYTES)
    return found


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


class OnceTensors:
    """Tensors by name, in one memory of this host. `token` is the same on all workers that share that memory."""

    def __init__(self, memory: OnceMemory, forms: Mapping[str, Form]) -> None:
        self.memory = memory
        self.token = bytes(memory.shared[:TOKEN_BYTES].tolist())
        places = list(zip(forms.items(), offsets(list(forms.values())), strict=False))
        self._spans = {
            name: slice(offset, offset + -(-form.num_bytes // PAGE_BYTES) * PAGE_BYTES)
            for (name, form), offset in places
        }
        self._places = places
        self.shared = self.placed(memory.shared)
        """What all workers see at once."""
        self.views = self.placed(memory.view)
        """The same for this worker's script. See Note [A view that may be written] in wire/shared/once.py."""

    def placed(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in another view of the memory."""
        return {name: _placed(memory, form, offset) for (name, form), offset in self._places}

    def written(self, names: Iterable[str]) -> list[slice]:
        """The bytes of the named tensors, in whole pages, to which this worker's script has written."""
        found = self.memory.written()
        spans = [self._spans[name] for name in names] if found else []
        return [part for span in spans for written in found if (part := _common(span, written))]

    def changed(self, written: Sequence[slice]) -> list[slice]:
        """Those of them that are not what all workers see: a script may have written what stood there."""
        return [span for span in written if self.memory.differs(span)]

    def digest(self, changes: Sequence[slice]) -> bytes:
        """Of what this worker's script has written there."""
        digest = hashlib.sha256()
        for change in changes:
            digest.update(f"{change.start} {change.stop} ".encode())
            digest.update(_content(self.memory.view[change]))
        return digest.digest()

    def forget(self, written: Sequence[slice]) -> None:
        """In these bytes the views show what all workers see."""
        for span in written:
            self.memory.forget(span)

    def publish(self, name: str, start: int, stop: int, changes: Sequence[slice]) -> None:
        """Elements `start` to `stop` of a tensor: where this worker's script has changed them, all see that."""
        view, shared = self.views[name], self.shared[name]
        width, offset = view.dtype.itemsize, self._spans[name].start
        for change in changes:
            part = _common(slice(start, stop), slice((change.start - offset) // width, (change.stop - offset) // width))
            if part:
                flat(shared)[part] = flat(view)[part]


def _common(one: slice, other: slice) -> slice | None:
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return slice(start, stop) if start < stop else None


def hold_once(wire: Wire, forms: Mapping[str, Form], tensors: Mapping[str, torch.Tensor]) -> OnceTensors:
    """Collective. Tensors of these forms in memory that the workers of each host share; zero where none is given.

    The first worker of a host writes its `tensors` there. The others compare them with their own; where they differ it
    raises a Disagreement on all workers. Nothing else is changed.
    """
    once, lead = map_once(wire, forms, tensors), wire.host_members[0]
    report = "" if wire.world.rank == lead else _first_difference(once, tensors, lead)
    for rank, text in enumerate(exchange_texts(wire.transport, report)):
        if text:
            name, there, theirs, mine = text.split("\t")
            raise Disagreement(f"the value of {name}", int(there), theirs, rank, mine)
    return once


def map_once(wire: Wire, forms: Mapping[str, Form], tensors: Mapping[str, torch.Tensor]) -> OnceTensors:
    """Collective on each host. The same without the comparison; sends no message, so any thread may call it."""
    num_bytes = offsets(list(forms.values()))[-1]
    lead = wire.host_members[0]
    if wire.world.rank == lead:
        return OnceTensors(_founded(wire, num_bytes, tensors, forms), forms)
    assert wire.host is not None
    file = wire.host.next_file(lead)
    try:
        return OnceTensors(OnceMemory(file, num_bytes), forms)
    finally:
        os.close(file)


def _first_difference(once: OnceTensors, tensors: Mapping[str, torch.Tensor], lead: int) -> str:
    """Names a tensor that is not what the `lead` has written, with a digest of both; empty if there is none."""
    for name, tensor in tensors.items():
        own, written = _bytes(tensor, once.shared[name]), flat(once.shared[name]).view(torch.uint8)
        if not torch.equal(own, written):  # bit by bit: a NaN is equal to itself, and -0 is not +0
            return f"{name}\t{lead}\t{_digest(written)}\t{_digest(own)}"
    return ""


def _founded(wire: Wire, num_bytes: int, tensors: Mapping[str, torch.Tensor], forms: Mapping[str, Form]) -> OnceMemory:
    file = allocate(num_bytes)
    try:
        memory = OnceMemory(file, num_bytes)
        memory.shared[:TOKEN_BYTES] = torch.tensor(list(secrets.token_bytes(TOKEN_BYTES)), dtype=torch.uint8)
        for (name, form), offset in zip(forms.items(), offsets(list(forms.values())), strict=False):
            if name in tensors:
                _placed(memory.shared, form, offset).copy_(tensors[name])
        if wire.host is not None:
            wire.host.send_file(file)
    finally:
        os.close(file)
    return memory


def _placed(memory: torch.Tensor, form: Form, offset: int) -> torch.Tensor:
    return (
        memory[offset : offset + form.num_bytes]
        .view(form.dtype)
        .as_strided(form.shape, form.stride, offset // form.dtype.itemsize)
    )


def _bytes(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Its bytes, standing in memory as those of a dense tensor."""
    dense = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(tensor.detach())
    return flat(dense).view(torch.uint8)


def _digest(content: torch.Tensor) -> str:
    return f"SHA-256 {hashlib.sha256(_content(content)).hexdigest()[:12]}"


def _content(flat_bytes: torch.Tensor) -> bytes:
    return ctypes.string_at(flat_bytes.data_ptr(), flat_bytes.nbytes)
