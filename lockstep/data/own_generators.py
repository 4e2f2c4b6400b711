"""Random generators that a script has made itself, beside torch's, Python's and NumPy's own.

# Note [Generators of the script's own]
# torch's own generator, Python's and NumPy's are set for each sample and each lane. One that a script has made itself
# (`numpy.random.default_rng(0)`, `torch.Generator()`, `random.Random(0)`) goes on from draw to draw: its numbers depend
# on what this worker has read and computed before. So those that a data set holds, or that stand in the file of its
# class, are set for each sample like the others, and stand outside of reading where they stood. One from which lanes
# draw is named in a note (script/lanes/notes.py), and one that begins anew is refused on a newcomer, and after a resume
# where the source shows that the training depends on it (script/restart/values.py); else a note says so.
# Each draws from a key made of its place, such as the names of the attributes that lead to it: one that only some
# processes have made by now changes nothing for the others. A key of a table that is no word is none of its place:
# scripts keep a generator for each process there.
"""

import ctypes
import hashlib
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from lockstep.chance import fold
from lockstep.data.structure import attributes

_MOST_ITEMS, _MOST_THINGS = 100, 500
_PLAIN = frozenset({int, float, bool, str, bytes, type(None), torch.Tensor})
_NO_HOLDERS = sys.stdlib_module_names | {"torch", "numpy", "lockstep"}


def is_own(thing: Any) -> bool:
    """Whether it is a generator, and not one of those that the run sets itself."""
    kind: Any = type(thing)
    return _is_generator(kind) and all(thing is not one for one in _set_by_run())


@lru_cache(maxsize=4096)
def _is_generator(kind: type) -> bool:
    """By the type alone: some objects run code of their own when they are asked for their class."""
    numpy = sys.modules.get("numpy.random")
    of_numpy = () if numpy is None else (numpy.Generator, numpy.RandomState)
    is_one = issubclass(kind, (torch.Generator, random.Random, *of_numpy))
    return is_one and not issubclass(kind, random.SystemRandom)


def _set_by_run() -> Iterator[Any]:
    yield torch.default_generator
    yield from torch.cuda.default_generators
    yield random.random.__self__  # type: ignore[attr-defined]
    if (numpy := sys.modules.get("numpy.random")) is not None:
        yield numpy.mtrand._rand


@dataclass(frozen=True)
class OwnGenerator:
    """One of them, with the methods of torch's."""

    generator: Any
    place: str = ""
    """Where it stands: another one for each of those that are set together."""

    def get_state(self) -> Any:
        one = self.generator
        if isinstance(one, torch.Generator):
            return one.get_state()
        if isinstance(one, random.Random):
            return one.getstate()
        return one.get_state(legacy=False) if _is_legacy(one) else one.bit_generator.state

    def set_state(self, state: Any) -> None:
        one = self.generator
        if isinstance(one, random.Random):
            one.setstate(state)
        elif isinstance(one, torch.Generator) or _is_legacy(one):
            one.set_state(state)
        else:
            one.bit_generator.state = state

    def manual_seed(self, key: int) -> None:
        """It draws from a key of its own, made of `key`: not what the others that are set with it draw."""
        self._seed(fold(key, "own", self.place))

    def _seed(self, key: int) -> None:
        one = self.generator
        if isinstance(one, torch.Generator):
            one.manual_seed(key)
        elif isinstance(one, random.Random):
            one.seed(key)
        elif _is_legacy(one):
            self.set_state(type(one._bit_generator)(key).state)  # no normal number is kept then
        else:
            self.set_state(type(one.bit_generator)(key).state)

    def digest(self) -> str:
        """Another one when something was drawn."""
        state = self.get_state()
        if isinstance(state, torch.Tensor):
            content = ctypes.string_at(state.data_ptr(), state.nbytes)
        elif isinstance(state, dict) and "key" in state["state"]:  # a twister of 624 words
            words = state["state"]
            content = words["key"].tobytes() + repr({**state, "state": words.get("pos")}).encode()
        else:
            content = repr(state).encode()
        return hashlib.blake2b(content, digest_size=8).hexdigest()


@contextmanager
def untouched(generators: Sequence[OwnGenerator]) -> Iterator[None]:
    """Afterwards they stand where they stood before."""
    before = [one.get_state() for one in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def held_by(*holders: Any) -> list[OwnGenerator]:
    """The generators of the script's own that these things hold, or that stand in the files of their classes.

    Of long lists the first items are looked at. One that draws on a GPU is left alone: a loader's process cannot set
    it.
    """
    found: list[OwnGenerator] = []
    seen: set[int] = set()
    waiting = deque((str(number), holder) for number, holder in enumerate(holders))
    while waiting and len(seen) < _MOST_THINGS:
        place, thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if is_own(thing):
            if not isinstance(thing, torch.Generator) or thing.device.type == "cpu":
                found.append(OwnGenerator(thing, place))
            continue
        kind: Any = type(thing)
        if parts := [(f"{place}/{name}", one) for name, one in _parts(thing) if type(one) not in _PLAIN]:
            waiting += parts
        if files := _looked_at([thing]) if kind is FunctionType else _files_of(kind):
            waiting += _variables_of(files)
    return found


def _parts(thing: Any) -> Iterable[tuple[str | int, Any]]:
    """What it holds, each with its name there."""
    kind: Any = type(thing)
    if issubclass(kind, dict):
        items = list(thing.items())[:_MOST_ITEMS]
        return [(key if isinstance(key, str) else "", one) for key, one in items]
    if issubclass(kind, list | tuple):
        return enumerate(thing[:_MOST_ITEMS])
    if issubclass(kind, partial):
        return [("func", thing.func), *enumerate(thing.args), *thing.keywords.items()]
    if issubclass(kind, MethodType):
        return [("self", thing.__self__), ("func", thing.__func__)]
    if issubclass(kind, FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        held = [(f"of {name}", cell.cell_contents) for name, cell in cells if _is_set(cell)]
        return [*held, *enumerate(thing.__defaults__ or ())]
    if issubclass(kind, type | torch.Tensor | ModuleType):
        return []
    return list(attributes(thing).items())


@lru_cache(maxsize=4096)
def _files_of(kind: Any) -> list[tuple[str, dict[str, Any]]]:
    """Those in which the methods of such an object stand."""
    return _looked_at([one for base in kind.__mro__ for one in vars(base).values() if type(one) is FunctionType])


def _looked_at(functions: Iterable[FunctionType]) -> list[tuple[str, dict[str, Any]]]:
    """The variables of their files, each with the name of the file."""
    files = {id(one.__globals__): one for one in functions}.values()
    own = [one for one in files if str(one.__globals__.get("__name__")).split(".")[0] not in _NO_HOLDERS]
    return [(Path(one.__code__.co_filename).name, one.__globals__) for one in own]


def _variables_of(files: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, Any]]:
    """The generators among them."""
    for file, variables in files:
        yield from [(f"{file}:{name}", one) for name, one in list(variables.items()) if is_own(one)]


def _is_legacy(generator: Any) -> bool:
    """Whether it is a RandomState of NumPy."""
    return not hasattr(generator, "bit_generator")


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
