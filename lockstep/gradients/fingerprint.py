"""A cheap fingerprint of parameters, buffers and optimizer state, by name: replicas that drift apart are found.

# Note [Every flipped bit shows]
# A tensor's bytes are read as 64-bit words, cut into equal parts, and each part is added up, wrapping around at 2^64. A
# flipped bit changes one word by 2^k or -2^k, which is never 0 modulo 2^64, so one sum changes. Each sum goes through a
# one-to-one scramble that depends on its place, and an entry is the total of its scrambled sums: one changed sum is one
# changed entry, for certain. Two flips can hide each other in one part only: the same bit of two words, in opposite
# directions (bit 63: in any). Whole numbers that wrap around add up alike in any order, so an entry depends on the
# tensor's bits in the order of its elements, and not on strides, threads or device.
"""

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import BadArgument

WORD_BYTES = 8
MOST_PARTS = 512
"""Into how many parts a tensor is cut at most: a power of two, as are all numbers of parts."""
WORDS_PER_PART = 256
"""No part is shorter, unless it is the only one: scrambling its sum must cost little against adding it up."""
MOST_NAMED = 3

_CAUSE = "If the script itself does it, `lockstep verify SCRIPT` shows where."

_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Sums:
    """The sums of one tensor, or the one number of something else; they count from `place` on in entry `entry`."""

    entry: int
    place: int
    values: torch.Tensor


@dataclass(frozen=True)
class Drift:
    """Replicas that are no longer equal. `guilty` differ from `healthy`, the first of a majority that agrees.

    Without a majority (two workers, say) nobody is guilty and nobody is healthy. `names` are those on which not all
    workers agree, in sorted order; none if they do not even hold the same number of tensors.
    """

    guilty: tuple[int, ...]
    healthy: int | None
    names: tuple[str, ...]

    def sentence(self, step: int, slots: Sequence[int] | None = None) -> str:
        """The drift as a sentence; `slots` gives each rank's name for people, if that is another number."""
        where = _first_of(self.names)
        if self.healthy is None:
            return (
                f"! step {step}: the workers have drifted apart: they differ {where}; no majority of them agrees, so "
                f"nobody can be healed. Resume from a checkpoint of before step {step}. {_CAUSE}"
            )
        numbers = [rank if slots is None else slots[rank] for rank in (*self.guilty, self.healthy)]
        who = "worker" if len(self.guilty) == 1 else "workers"
        verb = "has" if len(self.guilty) == 1 else "have"
        listed = " and ".join(", ".join(map(str, numbers[:-1])).rsplit(", ", 1))
        return (
            f"! step {step}: {who} {listed} {verb} drifted from the majority: different bits {where}; "
            f"healed from worker {numbers[-1]}. {_CAUSE}"
        )


@torch.no_grad()
def fingerprints(state: Mapping[str, Any]) -> torch.Tensor:
    """One 64-bit entry per name, in sorted order, on the CPU: flipping any one bit of a tensor changes its entry.

    Values are tensors of any dtype on any device, plain numbers and texts, or lists and mappings of them; of other
    objects only the type counts. Costs one reading of the memory, and a copy of what is not contiguous or does not
    start at a whole word of its storage. See Note [Every flipped bit shows].
    """
    entries = torch.zeros(len(state), dtype=torch.int64, device="cpu")
    by_device: dict[torch.device, list[Sums]] = {}
    for entry, name in enumerate(sorted(state)):
        for sums in _sums(entry, name, state[name]):
            by_device.setdefault(sums.values.device, []).append(sums)
    for found in by_device.values():
        _add_scrambled(entries, found)
    return entries


def combined(vector: torch.Tensor) -> bytes:
    """Sixteen bytes that stand for all entries: equal bytes, equal fingerprints."""
    return hashlib.blake2b(struct.pack(f"<{vector.numel()}q", *vector.tolist()), digest_size=16).digest()


def odd_ones(vectors: Sequence[torch.Tensor], names: Iterable[str]) -> Drift | None:
    """Who differs from the strict majority of workers that agree on every entry; None if all agree.

    `vectors` are the workers' fingerprints by rank, `names` those of the state, in any order.
    """
    held = [combined(vector) for vector in vectors]
    if len(set(held)) <= 1:
        return None
    common, count = Counter(held).most_common(1)[0]
    differing = _differing(vectors, sorted(names))
    if 2 * count <= len(held):
        return Drift((), None, differing)
    guilty = tuple(rank for rank, mine in enumerate(held) if mine != common)
    return Drift(guilty, held.index(common), differing)


def _differing(vectors: Sequence[torch.Tensor], names: Sequence[str]) -> tuple[str, ...]:
    if any(vector.numel() != len(names) for vector in vectors):
        return ()
    table = torch.stack([vector.cpu() for vector in vectors])
    same = (table == table[0]).all(0).tolist()
    return tuple(name for name, agreed in zip(names, same, strict=True) if not agreed)


def _first_of(names: Sequence[str]) -> str:
    if not names:
        return "in how many tensors they hold"
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"in {', '.join(names[:MOST_NAMED])}{more}"


def _sums(entry: int, name: str, value: Any) -> Iterator[Sums]:
    place = 0
    for leaf in _leaves(value):
        values = _added_up(_words(leaf, name)) if isinstance(leaf, torch.Tensor) else _number_of(leaf)
        yield Sums(entry, place, values)
        place += values.numel()


def _leaves(value: Any) -> Iterator[Any]:
    """The value itself, or all that lists and mappings hold, in one order everywhere."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield repr(key)
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _words(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor's bytes in the order of its elements, as 64-bit words; a view of it wherever that is possible."""
    if tensor.layout != torch.strided:
        raise BadArgument(f"{name} is a sparse tensor, which has no fingerprint: its bits have no fixed order.")
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)  # copying truth values turns a damaged one into a plain True
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.nbytes % WORD_BYTES or flat.storage_offset() * flat.itemsize % WORD_BYTES:
        flat = padded(flat)
    return flat.view(torch.int64)


def padded(flat: torch.Tensor) -> torch.Tensor:
    """A copy that starts at a whole word and ends, with zeros, at another."""
    num_bytes = math.ceil(flat.nbytes / WORD_BYTES) * WORD_BYTES
    copy = torch.zeros(num_bytes, dtype=torch.uint8, device=flat.device)
    copy[: flat.nbytes] = flat.view(torch.uint8)
    return copy


def _added_up(words: torch.Tensor) -> torch.Tensor:
    """The sum of each part; none for a tensor without elements."""
    if not words.numel():
        return words
    return words.view(_num_parts(words.numel()), -1).sum(1)


def _num_parts(num_words: int) -> int:
    """The largest power of two that cuts the words into equal parts, none too many and none too short."""
    room = max(1, num_words // WORDS_PER_PART)
    return math.gcd(num_words, min(MOST_PARTS, 1 << room.bit_length() - 1))


def _number_of(value: Any) -> torch.Tensor:
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # a NumPy array or scalar
        content = value.tobytes()
    else:
        content = repr(value).encode() if isinstance(value, _PLAIN) else b""
    mark = hashlib.blake2b(type(value).__qualname__.encode() + b"=" + content, digest_size=WORD_BYTES).digest()
    return torch.tensor([int.from_bytes(mark, "little", signed=True)], dtype=torch.int64, device="cpu")


def _add_scrambled(entries: torch.Tensor, found: Sequence[Sums]) -> None:
    """Adds sums of one device to the entries they belong to; they come to the CPU together."""
    values = torch.cat([sums.values for sums in found]).cpu()
    counts = torch.tensor([sums.values.numel() for sums in found], device="cpu")
    owners = torch.tensor([sums.entry for sums in found], device="cpu").repeat_interleave(counts)
    shifts = torch.tensor([sums.place for sums in found], device="cpu") - (counts.cumsum(0) - counts)
    places = torch.arange(values.numel(), device="cpu") + shifts.repeat_interleave(counts)
    entries.index_add_(0, owners, scrambled(values, places))


def scrambled(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014), one-to-one on 64-bit numbers, offset by the place."""
    mixed = values + (places + 1) * _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return mixed ^ _shifted(mixed, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Right shift that brings in zeros: torch's own copies the sign, and two numbers could become one."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
