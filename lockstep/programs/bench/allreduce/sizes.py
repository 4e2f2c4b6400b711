"""Numbers of bytes as people write them: "4KiB,1MiB" and "4KiB..128MiB". Without torch."""

import re
from collections.abc import Iterator

from lockstep.errors import BadArgument
from lockstep.settings.limits import MOST_DIGITS

KiB, MiB, GiB = 2**10, 2**20, 2**30

USUAL = (4 * KiB, 16 * KiB, 64 * KiB, 256 * KiB, 1 * MiB, 4 * MiB, 25 * MiB, 128 * MiB)
"""What a range runs through: from a small layer's gradient over DDP's bucket of 25 MiB to a large bucket."""

ELEMENT_BYTES = 4  # a float32
_UNITS = {"": 1, "b": 1, "kib": KiB, "mib": MiB, "gib": GiB}
_ALLOWED = 'give sizes such as "4KiB,1MiB" or a range such as "4KiB..128MiB", in B, KiB, MiB or GiB'


def parse_sizes(text: str) -> tuple[int, ...]:
    """The sizes in bytes, in the order they are named, each once. A range is what is usual within it, and its ends."""
    return tuple(dict.fromkeys(size for part in text.split(",") for size in _part(part)))


def named(num_bytes: int) -> str:
    """The size in the largest unit that keeps it whole: "25 MiB"."""
    units = ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"), (1, "B"))
    unit, name = next((unit, name) for unit, name in units if num_bytes % unit == 0)
    return f"{num_bytes // unit} {name}"


def _part(text: str) -> Iterator[int]:
    low, dots, high = text.partition("..")
    if not dots:
        yield _size(text)
        return
    ends = _size(low), _size(high)
    if ends[0] > ends[1]:
        raise BadArgument(f"the range {text.strip()} ends below its beginning: {_ALLOWED}")
    yield from sorted({*ends, *(size for size in USUAL if ends[0] < size < ends[1])})


def _size(text: str) -> int:
    match = re.fullmatch(rf"\s*([0-9]{{1,{MOST_DIGITS}}})\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise BadArgument(f"{text.strip()[:60]!r} is not a size: {_ALLOWED}")
    num_bytes = int(match[1]) * _UNITS[match[2].lower()]
    if num_bytes == 0 or num_bytes % ELEMENT_BYTES:
        raise BadArgument(f"{text.strip()} is no whole number of float32, {ELEMENT_BYTES} bytes each, 1 or more")
    return num_bytes
