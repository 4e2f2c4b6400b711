"""What every worker must know of every other before a step can end: one small record each.

# Note [Size of a record]
# All workers read the records of all, in every step. So a record has an entry for each lane that its worker carries and
# none for the others, and what is merely true or false is a bit: the bits of a thousand workers are put together
# in less than a millisecond. Records are exchanged as pieces of one size, that of the worker with the most lanes.

# Note [Losses do not wait for the backward pass]
# The record of a step holds its losses, so they must come to the host. Reading a tensor that is on a GPU waits for all
# that was launched before: the whole backward pass. So a loss is sent off to the host when it is reported, before its
# backward pass, with an event behind it. When the record is written the host waits for this event alone, while
# the GPU is busy with what came after it.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from itertools import chain
from typing import Protocol

import torch

from lockstep.errors import BadArgument, Misuse


class LaneLoss(Protocol):
    """A loss that a lane has reported."""

    def read(self) -> float: ...


@dataclass(frozen=True)
class HostLoss:
    """A loss on the CPU."""

    loss: torch.Tensor

    def read(self) -> float:
        return float(self.loss)


@dataclass(frozen=True)
class DeviceLoss:
    """A loss that is on its way from a GPU."""

    place: torch.Tensor
    event: torch.cuda.Event

    def read(self) -> float:
        self.event.synchronize()
        return float(self.place)

    @classmethod
    def of(cls, loss: torch.Tensor, place: torch.Tensor, event: torch.cuda.Event) -> "DeviceLoss":
        """Sends it to `place`, in memory that is pinned. See Note [Losses do not wait for the backward pass]."""
        place.copy_(loss.reshape(()), non_blocking=True)
        event.record(torch.cuda.current_stream(loss.device))
        return cls(place, event)


def lane_loss(loss: torch.Tensor) -> LaneLoss:
    """The loss, which may be on a GPU, as it is now."""
    value = loss.detach()
    if not value.is_cuda:
        return HostLoss(value.clone())
    place = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
    return DeviceLoss.of(value, place, torch.cuda.Event())


class StepRequest(IntEnum):
    """What a worker may ask all to do before the next step."""

    CHANGE = 0
    """Form another generation: a worker leaves, or is to be copied."""
    INTERRUPT = 1
    """Save and end, as after Ctrl-C."""
    TERMINATE = 2
    """Save and end, as after SIGTERM."""
    JOIN = 3
    """Form another generation, with a newcomer that waits, where the next turn of the script begins."""
    FIRST = 4
    """The script may have given worker 0 things that no other has: if it is lost, its replacement is waited for."""
    STAY = 5
    """Nothing: this worker does not leave. Where no worker stays, all save and end instead."""


NO_LANE = 0xFFFFFFFF
"""Where an entry of a record is empty."""

SUMMED = math.inf
"""What a lane is weighted by whose loss is a sum: it counts whole. No weight of a user can be it."""


@dataclass(frozen=True)
class Weights:
    """What the lanes of a step count by, and what they are divided by. See Note [Scale of given weights] in step.py."""

    lanes: Mapping[int, float]
    total: float
    summed: bool = False


@dataclass
class StepRecord:
    """One worker's account of a step, or, after `merge`, that of all workers.

    `weights` and `losses` are by lane, None where none was reported, and so are `times_s`, what each lane took. `used`
    says which parameters had a gradient in some lane, `changed` which buffers were written to. `squares` are those of
    the lanes' gradients, in steps in which they are taken, and so are `marks` (see marks.py). `requests` are what a
    worker asks all to do after the step: one worker is enough. `carries`: a lane has left something to be carried on.
    `is_partial`: the loss of a lane was seen to be a mean over something else than its samples. `health` is a worker's
    own few bytes, of one size everywhere; of all, `healths` has them by rank.
    """

    weights: list[float | None]
    losses: list[float | None]
    used: list[bool]
    changed: list[bool]
    times_s: list[float | None]
    squares: list[float | None] = field(default_factory=list)
    marks: list[float | None] = field(default_factory=list)
    requests: list[bool] = field(default_factory=lambda: [False] * len(StepRequest))
    carries: bool = False
    is_partial: bool = False
    health: bytes = b""
    healths: list[bytes] = field(default_factory=list)

    @classmethod
    def empty(cls, num_lanes: int, num_parameters: int, num_buffers: int) -> "StepRecord":
        flags = [False] * num_parameters, [False] * num_buffers
        return cls([None] * num_lanes, [None] * num_lanes, *flags, [None] * num_lanes)

    def pack(self, most_lanes: int) -> bytes:
        """Of one size on all workers, none of which reports more than `most_lanes`. See Note [Size of a record]."""
        columns = self._columns()
        reported = [lane for lane in range(len(self.weights)) if any(column[lane] is not None for column in columns)]
        entry = _entry(len(columns))
        entries = bytearray()
        for lane in reported:
            numbers = [column[lane] for column in columns]
            known = sum(1 << place for place, number in enumerate(numbers) if number is not None)
            entries += entry.pack(lane, known, *(0.0 if number is None else number for number in numbers))
        flags = self._flags()
        bits = _as_bits(flags).to_bytes(_num_bytes(flags), "little")
        return bytes(entries).ljust(most_lanes * entry.size, b"\xff") + bits + self.health

    def merge(self, rank: int, packed: Mapping[int, bytes]) -> None:
        """Afterwards it is the record of all workers: this one, of worker `rank`, and what its peers have `packed`.

        A lane's numbers come from the one worker that reported them. Takes time for every lane and every worker once.
        """
        columns, flags = self._columns(), self._flags()
        entry, num_bytes, num_health = _entry(len(columns)), _num_bytes(flags), len(self.health)
        ends = {peer: len(record) - num_health for peer, record in packed.items()}
        healths = {rank: self.health, **{peer: record[ends[peer] :] for peer, record in packed.items()}}
        bits = _as_bits(flags)
        for flagged in {record[ends[peer] - num_bytes : ends[peer]] for peer, record in packed.items()}:
            bits |= int.from_bytes(flagged, "little")
        entries = b"".join(record[: ends[peer] - num_bytes] for peer, record in packed.items())
        for lane, known, *numbers in entry.iter_unpack(entries):
            if lane == NO_LANE:
                continue
            for place, (column, number) in enumerate(zip(columns, numbers, strict=True)):
                if known >> place & 1:
                    column[lane] = number
        self._take(columns, _as_flags(bits, len(flags)))
        self.healths = [healths[peer] for peer in sorted(healths)]

    def _columns(self) -> list[list[float | None]]:
        """The numbers of lanes: a list over the lanes for each kind of number."""
        lanes = len(self.weights)
        kinds = range(0, len(self.squares), max(1, lanes))
        return [
            [*self.weights],
            [*self.losses],
            [*self.times_s],
            *(self.squares[first : first + lanes] for first in kinds),
            *([[*self.marks]] if self.marks else []),
        ]

    def _flags(self) -> list[bool]:
        return [self.carries, self.is_partial, *self.requests, *self.used, *self.changed]

    def _take(self, columns: list[list[float | None]], flags: list[bool]) -> None:
        self.weights, self.losses, self.times_s, *others = columns
        self.marks = others.pop() if self.marks else []
        self.squares = list(chain.from_iterable(others))
        requests, used = 2 + len(self.requests), 2 + len(self.requests) + len(self.used)
        self.carries, self.is_partial, self.requests = flags[0], flags[1], flags[2:requests]
        self.used, self.changed = flags[requests:used], flags[used:]

    def lane_weights(self, shares: dict[int, int]) -> Weights:
        """The weight of each lane of `shares` (lane to number of samples): what was reported, else its samples."""
        _refuse_mixed([lane for lane in shares if self.weights[lane] == SUMMED], shares, 'reduction="sum"', "Add up")
        if self.weights[min(shares)] == SUMMED:
            return Weights(dict.fromkeys(shares, 1.0), 1.0, summed=True)
        _refuse_mixed([lane for lane in shares if self.weights[lane] is not None], shares, "weight=...", "Weight")
        reported = {lane: self.weights[lane] for lane in shares}
        weights = {lane: float(shares[lane]) if weight is None else weight for lane, weight in reported.items()}
        total = sum(weights.values())
        if total <= 0:
            raise BadArgument("the weights of all lanes add up to 0, so there is nothing to average in this step")
        return Weights(weights, total)

    def loss(self, weights: Weights) -> float | None:
        """The lanes' losses averaged by weight, or their sum, added in lane order; None if a lane reported none."""
        total = 0.0
        for lane, weight in weights.lanes.items():
            loss = self.losses[lane]
            if loss is None:
                return None
            total += weight * loss if weight else 0.0  # the mean over nothing is not a number
        return total / weights.total


def _refuse_mixed(weighted: Sequence[int], shares: Mapping[int, int], how: str, verb: str) -> None:
    if weighted and len(weighted) < len(shares):
        raise Misuse(
            f"lanes {list(weighted)} were given by run.backward(loss, {how}), lanes "
            f"{sorted(set(shares) - set(weighted))} were not. {verb} all lanes of a step, or none."
        )


@lru_cache(maxsize=64)
def _entry(num_kinds: int) -> struct.Struct:
    """Of one lane: its number, which of its numbers are known, and these."""
    return struct.Struct(f"<IB{num_kinds}d")


def _num_bytes(flags: list[bool]) -> int:
    return (len(flags) + 7) // 8


def _as_bits(flags: list[bool]) -> int:
    """The first flag is the highest bit."""
    return int(bytes(flags).translate(_DIGITS), 2)


def _as_flags(bits: int, number: int) -> list[bool]:
    return [digit == "1" for digit in f"{bits:0{number}b}"]


_DIGITS = bytes.maketrans(b"\0\1", b"01")
