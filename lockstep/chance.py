"""Chance that depends on what is computed, never on who computes it.

# Note [Keys]
# A generator is never seeded with `seed + rank`. Every use of chance has a key made of the run's seed, a
# word for the use, and the indices that name it: `fold(seed, "lane", step, lane)`. Equal keys give equal
# numbers on every worker; different keys give unrelated ones.
"""

import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from lockstep.mersenne import Mersenne, OfNumpy, OfPython

_python = Mersenne(OfPython())


def fold(seed: int, *path: str | int) -> int:
    """A 63-bit key for one use of chance. See Note [Keys]."""
    text = "/".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def set_generators(key: int) -> None:
    """Sets torch's generators (CPU, and CUDA where it is in use), Python's and NumPy's from one key."""
    set_cpu_generators(key)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:  # torch.cuda's own functions take several times as long
            generator.manual_seed(key)


def set_cpu_generators(key: int) -> None:
    """Sets torch's CPU generator, Python's and NumPy's from one key; 10 us, cheap enough for every sample."""
    torch.default_generator.manual_seed(key)  # torch.manual_seed also walks every accelerator: 128 us
    random.seed(key)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(key & 0xFFFFFFFF)


@dataclass(frozen=True)
class Generators:
    """The state of every generator that user code may draw from."""

    torch_cpu: torch.Tensor
    torch_cuda: torch.Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> "Generators":
        return cls.on_cpu(_of_this_gpu().get_state() if torch.cuda.is_initialized() else None)

    @classmethod
    def on_cpu(cls, torch_cuda: torch.Tensor | None = None) -> "Generators":
        """The state of the CPU's generators; restoring it leaves CUDA's alone, unless that is given."""
        numpy = _numpy()
        return cls(
            torch.default_generator.get_state(),
            torch_cuda,
            _python.read(),
            numpy.read() if numpy is not None else None,
        )

    def equal_on_cpu(self, other: "Generators") -> bool:
        """Whether nothing was drawn on the CPU between the two."""
        mine, theirs = self.numpy or (), other.numpy or ()
        same_numpy = len(mine) == len(theirs) and all(
            bool((a == b).all()) if hasattr(a, "all") else a == b for a, b in zip(mine, theirs, strict=True)
        )
        return torch.equal(self.torch_cpu, other.torch_cpu) and self.python == other.python and same_numpy

    def restore(self) -> None:
        torch.default_generator.set_state(self.torch_cpu)
        if self.torch_cuda is not None:
            _of_this_gpu().set_state(self.torch_cuda)
        _python.write(self.python)
        numpy = _numpy()
        if numpy is not None and self.numpy is not None:
            numpy.write(self.numpy)


def _of_this_gpu() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _numpy() -> Mersenne | None:
    """NumPy's global generator, if anybody has loaded it."""
    module = sys.modules.get("numpy")
    return None if module is None else _mersenne(module)


@lru_cache(maxsize=1)
def _mersenne(numpy: Any) -> Mersenne:
    return Mersenne(OfNumpy(numpy.random))


@contextmanager
def drawing_from(key: int) -> Iterator[None]:
    """Inside, all generators draw from `key`; afterwards they go on as if nothing had happened."""
    before = Generators.now()
    set_generators(key)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def keeping_cpu_generators() -> Iterator[None]:
    """Inside, anything may seed the CPU's generators; afterwards they go on as if nothing had happened."""
    before = Generators.on_cpu()
    try:
        yield
    finally:
        before.restore()


class Stream:
    """Chance of its own on the CPU: what draws inside `drawing()` goes on where it last stopped there.

    `own` are further torch generators that belong to the stream. They start from the same key, and outside
    `drawing()` they too stand where they stood.
    """

    def __init__(self, key: int, own: Sequence[torch.Generator] = ()) -> None:
        self._key = key
        self._own = tuple(own)
        self._inside: tuple[Generators, list[torch.Tensor]] | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        outside = self._now()
        self._enter()
        try:
            yield
        finally:
            self._inside = self._now()
            self._restore(outside)

    def _enter(self) -> None:
        if self._inside is not None:
            return self._restore(self._inside)
        set_cpu_generators(self._key)
        for generator in self._own:
            generator.manual_seed(self._key)
        return None

    def _now(self) -> tuple[Generators, list[torch.Tensor]]:
        return Generators.on_cpu(), [generator.get_state() for generator in self._own]

    def _restore(self, states: tuple[Generators, list[torch.Tensor]]) -> None:
        states[0].restore()
        for generator, state in zip(self._own, states[1], strict=True):
            generator.set_state(state)
