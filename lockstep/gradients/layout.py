"""Which parameter sits where in which bucket: decided once, the same on every worker."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

MiB = 1024 * 1024


@dataclass(frozen=True)
class Spec:
    """What a layout needs to know of a parameter. `model` counts the modules given to `replicate`."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    trainable: bool
    model: int = 0

    @classmethod
    def of(cls, name: str, parameter: torch.nn.Parameter, model: int = 0) -> "Spec":
        return cls(
            name,
            tuple(parameter.shape),
            _dense_stride(parameter),
            parameter.dtype,
            str(parameter.device),
            parameter.requires_grad,
            model,
        )

    @property
    def num_elements(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket. `index` counts all parameters of the run."""

    index: int
    offset: int
    spec: Spec


@dataclass(frozen=True)
class BucketLayout:
    """Gradients that are sent together: one dtype, one device, one model."""

    slots: tuple[Slot, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.slots[0].spec.dtype

    @property
    def device(self) -> torch.device:
        return torch.device(self.slots[0].spec.device)

    @property
    def num_elements(self) -> int:
        last = self.slots[-1]
        return last.offset + last.spec.num_elements


@dataclass(frozen=True)
class Layout:
    """All buckets, in the order in which they leave. See Note [Launch order] in engine.py."""

    buckets: tuple[BucketLayout, ...]

    @cached_property
    def fingerprint(self) -> str:
        text = "\n".join(f"{name}: {value}" for name, value in self.describe().items())
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def describe(self) -> dict[str, str]:
        """One line per parameter, for people: named when workers disagree."""
        return {
            f"gradient of {slot.spec.name}": f"{_short(slot.spec)} in bucket {number}"
            for number, bucket in enumerate(self.buckets)
            for slot in bucket.slots
        }


def make_layout(
    specs: Sequence[Spec],
    bucket_bytes: int = 25 * MiB,
    first_bucket_bytes: int = 1 * MiB,
    order: Sequence[int] | None = None,
) -> Layout:
    """Trainable parameters in the `order` of the backward pass: until it is known, in reverse order of registration.

    The first bucket of each kind is small, so that the wire starts early. A parameter larger than a bucket
    has one of its own. Buckets leave in the order in which they fill.
    """
    order = range(len(specs) - 1, -1, -1) if order is None else order
    kinds: dict[tuple[int, torch.dtype, str], list[tuple[int, Spec]]] = {}
    for index in order:
        spec = specs[index]
        if spec.trainable:
            kinds.setdefault((spec.model, spec.dtype, spec.device), []).append((index, spec))
    buckets = [bucket for kind in kinds.values() for bucket in _fill(kind, bucket_bytes, first_bucket_bytes)]
    when = {index: position for position, index in enumerate(order)}
    return Layout(tuple(sorted(buckets, key=lambda bucket: when[bucket.slots[-1].index])))


def _fill(entries: Sequence[tuple[int, Spec]], bucket_bytes: int, first_bucket_bytes: int) -> Iterator[BucketLayout]:
    slots: list[Slot] = []
    offset, limit = 0, first_bucket_bytes
    for index, spec in entries:
        if slots and (offset + spec.num_elements) * spec.dtype.itemsize > limit:
            yield BucketLayout(tuple(slots))
            slots, offset, limit = [], 0, bucket_bytes
        slots.append(Slot(index, offset, spec))
        offset += spec.num_elements
    yield BucketLayout(tuple(slots))


def _dense_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's own strides where they cover memory without gaps (channels_last), else contiguous ones."""
    like = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    return tuple(like.stride())


def _short(spec: Spec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}"
