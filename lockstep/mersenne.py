"""The states of Python's and NumPy's global generators, read and put back at every step.

# Note [Words in memory]
# Both generators are Mersenne twisters of 624 words. Python makes an object of every word when it is asked for them,
# and takes them back one by one; NumPy copies them one by one. Together that is 100 us for each step, more than all
# else that a small step costs beside its arithmetic. So the words are compared and copied where they lie. NumPy tells
# the address; Python's words lie behind the head of the object. Neither is believed: a state is remembered when the
# memory held what the generator said, and where it does not, the generator is asked each time.

# Note [Kept normal numbers]
# Normal numbers are made in pairs, and a generator keeps the second one for the next draw, beside its words. Only
# states in which none was kept are remembered. NumPy does not say cheaply whether it keeps one. But as long as the
# words are those of such a state nothing was drawn, since a normal number would have needed new ones. (A script that
# itself sets NumPy's words to those of a remembered state, with a number kept beside them, loses that number.)
"""

import ctypes
import random
import struct
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

_POSITION = struct.Struct("=i")
NUM_WORDS = 624
NUM_BYTES = 4 * NUM_WORDS + _POSITION.size

MOST_KNOWN = 4
"""How many states are remembered: those of the user's script, of the loader's order, and what is between them."""


class Generator(Protocol):
    """A global generator, by what it offers itself."""

    def address(self) -> int | None:
        """Where its words and its position in them lie; None if that cannot be known."""

    def keeps_normal(self) -> bool:
        """Whether it keeps a normal number for certain; False also where it does not say."""

    def forget_normal(self) -> None: ...

    def get(self) -> Any:
        """The state, as the generator gives it."""

    def put(self, state: Any) -> None: ...

    def content(self, state: Any) -> bytes | None:
        """What must lie in memory in this state; None if a normal number is kept beside it."""


@dataclass(frozen=True)
class Known:
    """A state in which no normal number was kept, and its memory."""

    state: Any
    content: bytes


class Mersenne:
    """Reads and writes the state of one generator. One thread at a time. See Note [Words in memory]."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._known: deque[Known] = deque(maxlen=MOST_KNOWN)

    def read(self) -> Any:
        """The state now. Nobody may change what is given."""
        generator = self._generator
        address = generator.address()
        content = None if address is None or generator.keeps_normal() else ctypes.string_at(address, NUM_BYTES)
        for known in self._known:
            if known.content == content:
                return known.state
        state = generator.get()
        if content is not None and generator.content(state) == content:
            self._known.append(Known(state, content))
        return state

    def write(self, state: Any) -> None:
        """`state` is what `read` gave, or the generator itself."""
        for known in self._known:
            if known.state is state:
                address = self._generator.address()
                if address is not None:
                    self._generator.forget_normal()
                    ctypes.memmove(address, known.content, NUM_BYTES)
                    return
        self._generator.put(state)


class OfPython:
    """That of the module `random`."""

    def __init__(self) -> None:
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

    def content(self, state: Any) -> bytes | None:
        _, (*words, position), kept = state
        return None if kept is not None else _POSITION.pack(position) + struct.pack(f"={NUM_WORDS}I", *words)


class OfNumpy:
    """That of `numpy.random`, the module of which is given."""

    def __init__(self, module: Any) -> None:
        self._random = module

    def address(self) -> int | None:
        """None if NumPy is too old to tell, or the user has put another kind of generator there."""
        if not hasattr(self._random, "get_bit_generator"):
            return None
        generator = self._random.get_bit_generator()
        if type(generator) is not self._random.MT19937:
            return None
        address: int = generator.ctypes.state_address
        return address

    def keeps_normal(self) -> bool:
        return False

    def forget_normal(self) -> None:
        self._random.seed(0)

    def get(self) -> Any:
        return self._random.get_state()

    def put(self, state: Any) -> None:
        self._random.set_state(state)

    def content(self, state: Any) -> bytes | None:
        _, words, position, keeps_normal, _ = state
        return None if keeps_normal else words.tobytes() + _POSITION.pack(position)
