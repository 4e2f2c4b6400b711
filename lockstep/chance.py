"""Chance that depends on what is computed, never on who computes it.

# Note [Keys]
# A generator is never seeded with `seed + rank`. Every use of chance has a key made of the run's seed, a
# word for the use, and the indices that name it: `fold(seed, "lane", step, lane)`. Equal keys give equal
# numbers on every worker; different keys give unrelated ones.

# Note [Words in memory]
# The global generators of Python and NumPy are Mersenne twisters of 624 words, whose states are read and put back at
# every step. Python makes an object of every word, NumPy copies them one by one: together 100 us a step, more than all
# else that a small step costs beside its arithmetic. So the words are compared and copied where they lie. NumPy gives
# the address; Python's words lie behind the head of the object. Neither is trusted: a state is remembered only if the
# memory held what the generator reported, and where it does not, the generator is asked each time.

# Note [Kept normal numbers]
# Normal numbers are made in pairs, and a generator keeps the second one for the next draw, beside its words. Only
# states in which none was kept are remembered. NumPy does not show cheaply whether it keeps one. But as long as the
# words are those of such a state nothing was drawn, since a normal number would have needed new ones. (A script that
# itself sets NumPy's words to those of a remembered state, with a number kept beside them, loses that number.)
"""

import ctypes
import hashlib
import random
import struct
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

_POSITION = struct.Struct("=i")
NUM_WORDS = 624
NUM_BYTES = 4 * NUM_WORDS + _POSITION.size

MOST_REMEMBERED = 4
"""How many states are remembered: those of the user's script, of the loader's order, and what is between them."""


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
            _PYTHON.read(),
            numpy.read() if numpy is not None else None,
        )

    def equal_on_cpu(self, other: "Generators") -> bool:
        """Whether nothing was drawn on the CPU between the two. NumPy may have been loaded in between."""
        mine, theirs = self.numpy, other.numpy
        same_numpy = (
            mine is theirs  # the same object as long as nothing is drawn
            or mine is None
            or theirs is None
            or all(bool((a == b).all()) if hasattr(a, "all") else a == b for a, b in zip(mine, theirs, strict=True))
        )
        return torch.equal(self.torch_cpu, other.torch_cpu) and self.python == other.python and same_numpy

    def has_moved_since(self, before: "Generators") -> bool:
        """Whether something was drawn since. A GPU may have come into use in between."""
        mine, theirs = self.torch_cuda, before.torch_cuda
        same_cuda = mine is None or theirs is None or torch.equal(mine, theirs)
        return not (same_cuda and self.equal_on_cpu(before))

    def restore(self) -> None:
        torch.default_generator.set_state(self.torch_cpu)
        if self.torch_cuda is not None:
            _of_this_gpu().set_state(self.torch_cuda)
        _PYTHON.write(self.python)
        numpy = _numpy()
        if numpy is not None and self.numpy is not None:
            numpy.write(self.numpy)


def _of_this_gpu() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]


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


class Seeded(Protocol):
    """A generator with the methods of torch's."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any, /) -> Any: ...

    def manual_seed(self, key: int, /) -> Any: ...


class Stream:
    """Chance of its own on the CPU: what draws inside `drawing()` goes on where it last stopped there.

    `own` are further generators that belong to the stream. They start from the same key, and outside
    `drawing()` they too stand where they stood.
    """

    def __init__(self, key: int, own: Sequence[Seeded] = ()) -> None:
        self._key = key
        self._own = tuple(own)
        self._inside: tuple[Generators, list[Any]] | None = None

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

    def _now(self) -> tuple[Generators, list[Any]]:
        return Generators.on_cpu(), [generator.get_state() for generator in self._own]

    def _restore(self, states: tuple[Generators, list[Any]]) -> None:
        states[0].restore()
        for generator, state in zip(self._own, states[1], strict=True):
            generator.set_state(state)


class Twister(ABC):
    """A global Mersenne twister, whose state is read and written fast. One thread at a time.

    See Note [Words in memory]. A subclass says what the generator itself offers.
    """

    def __init__(self) -> None:
        self._remembered: deque[tuple[Any, bytes]] = deque(maxlen=MOST_REMEMBERED)
        """States in which no normal number was kept, each with its memory."""

    def read(self) -> Any:
        """The state now. Nobody may change what is given."""
        address = self.address()
        memory = None if address is None or self.keeps_normal() else ctypes.string_at(address, NUM_BYTES)
        for state, remembered in self._remembered:
            if remembered == memory:
                return state
        state = self.get()
        if memory is not None and self.memory_of(state) == memory:
            self._remembered.append((state, memory))
        return state

    def write(self, state: Any) -> None:
        """`state` is what `read` gave, or the generator itself."""
        for known, memory in self._remembered:
            if known is state and (address := self.address()) is not None:
                self.forget_normal()
                ctypes.memmove(address, memory, NUM_BYTES)
                return
        self.put(state)

    @abstractmethod
    def address(self) -> int | None:
        """Where its words and its position in them lie; None if that cannot be known."""

    @abstractmethod
    def keeps_normal(self) -> bool:
        """Whether it keeps a normal number for certain; False also where it does not show."""

    @abstractmethod
    def forget_normal(self) -> None: ...

    @abstractmethod
    def get(self) -> Any:
        """The state, as the generator gives it."""

    @abstractmethod
    def put(self, state: Any) -> None: ...

    @abstractmethod
    def memory_of(self, state: Any) -> bytes | None:
        """What must lie in memory in this state; None if a normal number is kept beside it."""


class PythonTwister(Twister):
    """That of the module `random`."""

    def __init__(self) -> None:
        super().__init__()
        self._instance: Any = random.random.__self__  # type: ignore[attr-defined]
        head = object.__basicsize__
        fits = sys.implementation.name == "cpython" and type(self._instance).__basicsize__ >= head + NUM_BYTES
        self._address = id(self._instance) + head if fits else None

    def address(self) -> int | None:
        """None where an object is not what CPython makes of it."""
        return self._address

    def keeps_normal(self) -> bool:
        return self._instance.gauss_next is not None

    def forget_normal(self) -> None:
        self._instance.gauss_next = None

    def get(self) -> Any:
        return random.getstate()

    def put(self, state: Any) -> None:
        random.setstate(state)

    def memory_of(self, state: Any) -> bytes | None:
        _, (*words, position), kept = state
        return None if kept is not None else _POSITION.pack(position) + struct.pack(f"={NUM_WORDS}I", *words)


class NumpyTwister(Twister):
    """That of `numpy.random`, the module of which is given."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._random = module

    def address(self) -> int | None:
        """None if NumPy is too old to give it, or the user has put another kind of generator there."""
        if not hasattr(self._random, "get_bit_generator"):
            return None
        generator = self._random.get_bit_generator()
        address: int | None = generator.ctypes.state_address if type(generator) is self._random.MT19937 else None
        return address

    def keeps_normal(self) -> bool:
        return False

    def forget_normal(self) -> None:
        self._random.seed(0)

    def get(self) -> Any:
        return self._random.get_state()

    def put(self, state: Any) -> None:
        self._random.set_state(state)

    def memory_of(self, state: Any) -> bytes | None:
        _, words, position, keeps_normal, _ = state
        return None if keeps_normal else words.tobytes() + _POSITION.pack(position)


_PYTHON = PythonTwister()


def _numpy() -> Twister | None:
    """NumPy's global generator, if anybody has loaded it."""
    module = sys.modules.get("numpy")
    return None if module is None else _numpy_twister(module)


@lru_cache(maxsize=1)
def _numpy_twister(numpy: Any) -> Twister:
    return NumpyTwister(numpy.random)
