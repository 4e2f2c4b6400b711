"""In which order samples come: the user's own sampler, drawn alike on every worker.

# Note [Every worker draws the whole order]
# A global batch is a list of indices. Every worker runs the user's sampler itself and sees the same lists,
# because the sampler draws from generators set by the run's seed and the epoch and by nothing else: not by
# what the training loop draws, not by how far the loader reads ahead. Indices are cheap; samples are read
# only where their lane is carried. The lists are drawn one by one, so a sampler may be endless.
"""

import hashlib
import struct
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lockstep.chance import Stream, fold
from lockstep.data.batch import Position
from lockstep.data.samplers import Samplers
from lockstep.errors import BadArgument


@dataclass(frozen=True)
class Keys:
    """Makes the keys of all chance in the `index`-th loader of a run. See Note [Keys] in lockstep/chance.py."""

    seed: int
    index: int

    def of(self, use: str, *path: str | int) -> int:
        return fold(self.seed, use, self.index, *path)


@dataclass(frozen=True)
class Draw:
    """What the sampler drew for one global batch.

    `uses[i]` is how often `indices[i]` was drawn before in the pass; empty where they are not counted.
    """

    position: Position
    indices: tuple[Any, ...]
    uses: tuple[int, ...] = ()

    @cached_property
    def digest(self) -> str:
        """Equal for equal indices that were used equally often before; 2 us for 64 of them."""
        return hashlib.blake2b(content(self.indices) + content(self.uses), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Drawn:
    """What was handed out of a pass: how many samples, and a digest of their indices in order, however cut."""

    epoch: int
    num_samples: int
    digest: str

    def __str__(self) -> str:
        return f"{self.epoch}.{self.num_samples}={self.digest}"


class SampleOrder:
    """One pass over the samplers, one draw for each global batch. Keeps what is drawn but not handed out."""

    def __init__(self, samplers: Samplers, keys: Keys, epoch: int, *, count_uses: bool) -> None:
        self._samplers = samplers
        self._epoch = epoch
        self._num_drawn = self._num_samples = 0
        self._handed = hashlib.blake2b(digest_size=8)
        self._kept: deque[Draw] = deque()
        self._uses: Counter[Any] | None = Counter() if count_uses and samplers.may_repeat else None
        self._stream: Stream | None = Stream(keys.of("order", epoch), samplers.generators)
        with self._chance():
            self._iterator: Iterator[Any] | None = samplers.begin(epoch)

    @property
    def drawn(self) -> Drawn:
        """What was handed out or skipped so far."""
        return Drawn(self._epoch, self._num_samples, self._handed.hexdigest())

    def skip(self, num_steps: int) -> None:
        """The next draw is that of batch `num_steps`, if there is one; those before it are drawn and forgotten."""
        for _ in range(num_steps):
            draw = self._draw()
            if draw is None:
                return
            self._hand_out(draw.indices)

    def run_through(self, mark: int, most_samples: int) -> Drawn:
        """Draws the pass to its end, or past `most_samples`; returns what was drawn at `mark` samples."""
        at_mark = self.drawn
        while self._num_samples <= most_samples and (draw := self._draw()) is not None:
            before = max(mark - self._num_samples, 0)
            self._hand_out(draw.indices[:before])
            at_mark = self.drawn if before else at_mark
            self._hand_out(draw.indices[before:])
        return at_mark

    def ahead(self) -> Iterator[Draw]:
        """All that is not handed out: what is kept, then new draws. Only the newest iterator may go on."""
        yield from tuple(self._kept)
        while (draw := self._draw()) is not None:
            self._kept.append(draw)
            yield draw

    def handed_out(self) -> Draw:
        """The first kept batch is handed out, and will not be drawn again. Returns its draw."""
        draw = self._kept.popleft()
        self._hand_out(draw.indices)
        return draw

    def _hand_out(self, indices: Sequence[Any]) -> None:
        self._handed.update(content(indices))
        self._num_samples += len(indices)

    def _draw(self) -> Draw | None:
        drawn = self._next()
        if drawn is None:
            return None
        position = Position(self._epoch, self._num_drawn)
        self._num_drawn += 1
        if self._samplers.draw_at_first_only:
            self._stream = None  # switching generators costs 0.2 ms
        indices = as_tuple(drawn[0]) if self._samplers.batched else drawn
        return Draw(position, indices, self._counted(indices))

    def _next(self) -> tuple[Any] | None:
        """The sampler's next value in a tuple, for it may be None; None where the pass has ended."""
        if self._iterator is None:
            return None
        with self._chance():
            try:
                return (next(self._iterator),)
            except StopIteration:
                self._iterator = None
                return None

    def _counted(self, indices: tuple[Any, ...]) -> tuple[int, ...]:
        if self._uses is None:
            return ()
        uses = []
        for name in map(name_of, indices):
            uses.append(self._uses[name])
            self._uses[name] += 1
        return tuple(uses) if any(uses) else ()

    def _chance(self) -> AbstractContextManager[None]:
        return nullcontext() if self._stream is None else self._stream.drawing()


def content(indices: Sequence[Any]) -> bytes:
    """The indices as bytes, the same in every process, one behind the other: however they are cut into lists."""
    try:
        return struct.pack(f"<{len(indices)}q", *indices)
    except (struct.error, TypeError):  # one at least is no whole number, or too large
        return b"".join(map(_content_of_one, indices))


def _content_of_one(index: Any) -> bytes:
    if isinstance(index, str):
        return f"{index};".encode()
    try:
        return struct.pack("<q", index)
    except (struct.error, TypeError):
        return f"{name_of(index)};".encode()


def name_of(index: Any) -> int | str:
    """The index as part of a key: the same in every process."""
    if type(index) is int:
        return index
    name = str(index.item() if isinstance(index, torch.Tensor) and index.numel() == 1 else index)
    if " at 0x" in name:
        raise BadArgument(
            f"the sampler gives {name} as an index, which reads differently in every process, so no random "
            "numbers can be tied to it. Use integers, strings or tuples, or give the class a __repr__ that "
            "tells its content."
        )
    return name


def as_tuple(indices: Any) -> tuple[Any, ...]:
    """The indices of one batch, which a sampler may also give as a tensor or an array."""
    return tuple(indices.tolist() if hasattr(indices, "tolist") else indices)
