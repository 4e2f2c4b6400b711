"""Which parameter sits where in which bucket: decided once, the same on every worker.

# Note [As aligned as its own]
# A gradient in a bucket stands where a tensor of its own could: at a multiple of ALIGN_BYTES. Kernels choose their way
# by alignment (a fused update on a GPU takes four elements at once, or each alone), and may round differently on each.
# So a parameter's update does not depend on who stands before it in its bucket.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

MiB = 1024 * 1024

ALIGN_BYTES = 256
"""See Note [As aligned as its own]."""


@dataclass(frozen=True)
class Spec:
    """What a layout needs to know of a parameter. `model` counts the modules given to `replicate`.

    `reduced_as` is the dtype in which its gradient is added up, if that is another than its own.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    trainable: bool
    model: int = 0
    reduced_as: torch.dtype | None = None

    @classmethod
    def of(
        cls,
        name: str,
        parameter: torch.nn.Parameter,
        model: int = 0,
        reduce_dtype: torch.dtype | None = None,
    ) -> "Spec":
        """See Note [The dtype of the sum] in fold.py for `reduce_dtype`."""
        return cls(
            name,
            tuple(parameter.shape),
            dense_stride(parameter),
            parameter.dtype,
            str(parameter.device),
            parameter.requires_grad,
            model,
            reduce_dtype if parameter.dtype.is_floating_point else None,
        )

    @property
    def wire_dtype(self) -> torch.dtype:
        """In what its gradient is weighted, folded and added."""
        return self.dtype if self.reduced_as is None else self.reduced_as

    @property
    def num_elements(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def num_bytes(self) -> int:
        """Of its gradient on the wire."""
        return self.num_elements * self.wire_dtype.itemsize

    @property
    def align_elements(self) -> int:
        """So many elements are ALIGN_BYTES or a multiple, on the wire and in its own dtype."""
        return ALIGN_BYTES // min(self.dtype.itemsize, self.wire_dtype.itemsize)


@dataclass(frozen=True)
class ParameterSlot:
    """A parameter's place in its bucket. `index` counts all parameters of the run."""

    index: int
    offset: int
    spec: Spec


@dataclass(frozen=True)
class BucketLayout:
    """Gradients that are sent together: one dtype of the parameters, one on the wire, one device and model.

    What lies between two of them is zero. See Note [As aligned as its own].
    """

    slots: tuple[ParameterSlot, ...]

    @cached_property
    def dtype(self) -> torch.dtype:
        """In what the bucket is added up."""
        return self.slots[0].spec.wire_dtype

    @property
    def parameter_dtype(self) -> torch.dtype:
        return self.slots[0].spec.dtype

    @cached_property
    def converts(self) -> bool:
        return self.dtype != self.parameter_dtype

    @cached_property
    def device(self) -> torch.device:
        return torch.device(self.slots[0].spec.device)

    @property
    def num_bytes(self) -> int:
        """Of a buffer, as it is added up."""
        return self.num_elements * self.dtype.itemsize

    @cached_property
    def num_elements(self) -> int:
        last = self.slots[-1]
        return _up(last.offset + last.spec.num_elements, last.spec.align_elements)

    def cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The view of each parameter in a flat tensor that is laid out like this."""
        begin = whole.storage_offset()
        return [whole.as_strided(slot.spec.shape, slot.spec.stride, begin + slot.offset) for slot in self.slots]


@dataclass(frozen=True)
class Layout:
    """All buckets, in the order in which they leave. See Note [Launch order] in pipeline.py."""

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
    kinds: dict[tuple[object, ...], list[tuple[int, Spec]]] = {}
    for index in order:
        spec = specs[index]
        if spec.trainable:
            kind = (spec.model, spec.dtype, spec.wire_dtype, spec.device)
            kinds.setdefault(kind, []).append((index, spec))
    buckets = [bucket for entries in kinds.values() for bucket in _fill(entries, bucket_bytes, first_bucket_bytes)]
    when = {index: position for position, index in enumerate(order)}
    return Layout(tuple(sorted(buckets, key=lambda bucket: when[bucket.slots[-1].index])))


def _fill(entries: Sequence[tuple[int, Spec]], bucket_bytes: int, first_bucket_bytes: int) -> Iterator[BucketLayout]:
    slots: list[ParameterSlot] = []
    offset, limit = 0, first_bucket_bytes
    for index, spec in entries:
        if slots and (offset + spec.num_elements) * spec.wire_dtype.itemsize > limit:
            yield BucketLayout(tuple(slots))
            slots, offset, limit = [], 0, bucket_bytes
        slots.append(ParameterSlot(index, offset, spec))
        offset = _up(offset + spec.num_elements, spec.align_elements)
    yield BucketLayout(tuple(slots))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def dense_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's own strides where they cover memory without gaps (channels_last), else contiguous ones."""
    like = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    return tuple(like.stride())


def _short(spec: Spec) -> str:
    added = "" if spec.wire_dtype == spec.dtype else f" added in {_name(spec.wire_dtype)}"
    return f"{_name(spec.dtype)} {list(spec.shape)}{added}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
