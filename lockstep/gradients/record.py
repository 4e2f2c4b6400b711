"""What every worker must know of every other before a step can end: one small record each.

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


SUMMED = math.inf
"""What a lane is weighted by whose loss is a sum: it counts whole. No weight of a user can be it."""


@dataclass(frozen=True)
class Weights:
    """What the lanes of a step count by, and what they are divided by. See Note [Scale of told weights] in step.py."""

    lanes: Mapping[int, float]
    total: float
    summed: bool = False


@dataclass
class StepRecord:
    """One worker's account of a step, or, after `merge`, that of all workers.

    `weights` and `losses` are by lane, None where none was reported. `used` says which parameters had a gradient
    in some lane, `changed` which buffers were written to. `squares` are those of the lanes' gradients, in steps in
    which they are taken. `requests` are what a worker asks all to do after the step: one worker is enough. `carries`: a
    lane has left something to be carried on. `health` is a worker's own few bytes, of one size everywhere; of all,
    `healths` has them by rank.
    """

    weights: list[float | None]
    losses: list[float | None]
    used: list[bool]
    changed: list[bool]
    squares: list[float | None] = field(default_factory=list)
    requests: list[bool] = field(default_factory=lambda: [False] * len(StepRequest))
    carries: bool = False
    health: bytes = b""
    healths: list[bytes] = field(default_factory=list)

    @classmethod
    def empty(cls, num_lanes: int, num_parameters: int, num_buffers: int) -> "StepRecord":
        return cls([None] * num_lanes, [None] * num_lanes, [False] * num_parameters, [False] * num_buffers)

    def pack(self) -> bytes:
        numbers = [*self.weights, *self.losses, *self.squares]
        values = [0.0 if number is None else number for number in numbers]
        known = (number is not None for number in numbers)
        flags = bytes([*known, self.carries, *self.requests, *self.used, *self.changed])
        return _numbers(len(numbers)).pack(*values) + flags + self.health

    def merge(self, rank: int, packed: Mapping[int, bytes]) -> None:
        """Afterwards it is the record of all workers: this one, of worker `rank`, and what its peers have `packed`.

        A lane's numbers come from the one worker that reported them.
        """
        healths = {rank: self.health}
        for peer, record in packed.items():
            self._take(record)
            healths[peer] = record[len(record) - len(self.health) :]
        self.healths = [healths[peer] for peer in sorted(healths)]

    def _take(self, record: bytes) -> None:
        """Adds what a peer has packed."""
        lanes = len(self.weights)
        num_values = 2 * lanes + len(self.squares)
        numbers = _numbers(num_values)
        values = numbers.unpack_from(record)
        flags = memoryview(record)[numbers.size : len(record) - len(self.health)]
        known, rest = flags[:num_values], flags[num_values + 1 :]
        self.carries |= flags[num_values] != 0
        self.weights = _both(self.weights, values[:lanes], known[:lanes])
        self.losses = _both(self.losses, values[lanes : 2 * lanes], known[lanes : 2 * lanes])
        self.squares = _both(self.squares, values[2 * lanes :], known[2 * lanes :])
        requests, used = len(StepRequest), len(StepRequest) + len(self.used)
        self.requests = _either(self.requests, rest[:requests])
        self.used = _either(self.used, rest[requests:used])
        self.changed = _either(self.changed, rest[used:])

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
            f"lanes {list(weighted)} were told by run.backward(loss, {how}), lanes "
            f"{sorted(set(shares) - set(weighted))} were not. {verb} all lanes of a step, or none."
        )


@lru_cache(maxsize=64)
def _numbers(num_values: int) -> struct.Struct:
    """What a record begins with; flags follow, one byte each."""
    return struct.Struct(f"<{num_values}d")


def _both(mine: list[float | None], theirs: Sequence[float], known: Sequence[int]) -> list[float | None]:
    return [value if is_known else own for own, value, is_known in zip(mine, theirs, known, strict=True)]


def _either(mine: list[bool], theirs: Sequence[int]) -> list[bool]:
    return [own or their != 0 for own, their in zip(mine, theirs, strict=True)]
