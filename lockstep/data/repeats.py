"""Whether a data set gives a sample again when it is read again: what it keeps from sample to sample shows there.

# Note [Samples that repeat]
# A sample must depend on its index and the random numbers set for it alone. A running mean, the sample before, a count
# that goes into the next one: then it depends on what this process has read before, and so on the number of workers.
# A sample that was augmented once and kept depends on the epoch in which a worker has read it first. So where reading
# has changed something that the code of the data set reads back, the first sample is read again, twice: from the same
# random numbers, and, if it had drawn some, from others. In the first request of a process, the second, the fourth, and
# so on: a log (N) of them. Counts and lists that are only written are no reason to read anything again.
"""

import ast
import inspect
import sys
import textwrap
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import torch

from lockstep.data.contents import all_bytes
from lockstep.data.own_generators import is_own
from lockstep.data.structure import PLAIN, attributes, opened
from lockstep.events import KEPT_BY_DATA

_MOST_OBJECTS, _MOST_ITEMS, _MOST_BYTES = 50, 20, 1 << 20
_WRITES = frozenset({"append", "appendleft", "extend", "add", "update", "clear", "setdefault"})
_INSTALLED = sys.stdlib_module_names | {"torch", "numpy", "lockstep"}
_NO_HOLDERS = (type, torch.Tensor, ModuleType, FunctionType)


class _Held:
    """Equal to that of the same object, which stays alive: no other one has its place in memory."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self._thing is other._thing

    __hash__ = None  # type: ignore[assignment]


Marks = dict[tuple[int, str], tuple[str, Any]]


class Repeats:
    """What one process finds.

    `begin` opens a request, and `begin_load` its loading, which may be repeated: then `awaits` asks for the first
    sample, which `saw` is given, and `remark` closes it.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._num_requests = 0
        self._before: Marks | None = None
        self._first: tuple[Any, bool] | None = None

    def begin(self) -> None:
        """A request begins."""
        self._num_requests += 1
        is_due = self._num_requests & (self._num_requests - 1) == 0
        self._before, self._first = marks(self._dataset) if is_due else None, None

    def begin_load(self) -> None:
        self._first = None

    @property
    def awaits(self) -> bool:
        """Whether the first sample of the request is to be shown by `saw`."""
        return self._before is not None and self._first is None

    def saw(self, sample: Any, drew: bool) -> None:
        self._first = bits(sample), drew

    def remark(self, name: int | str, read: Callable[..., tuple[Any, bool]]) -> str | None:
        """What a user should know after the request whose first sample has this name.

        `read` reads that again, and says whether numbers were drawn: those of its place, or others, made with a word.
        """
        now = {} if self._before is None else marks(self._dataset)
        changed = [words for place, (words, mark) in now.items() if (self._before or {}).get(place) != (words, mark)]
        if not changed or self._first is None:
            return None
        first, drew = self._first
        what = f"{', '.join(dict.fromkeys(changed))}, which reading changes"
        where = f"{type(self._dataset).__name__}[{name}]"
        if bits(read()[0]) != first:
            return (
                f"{KEPT_BY_DATA}: {where} was another sample when it was read again from the same random numbers. "
                f"Samples seem to depend on {what}: then on what a process has read before, and so on the number of "
                "workers and of loading processes. Compute a sample from its index and random numbers alone."
            )
        again, draws = read("again") if drew else (None, True)
        if not draws and bits(again) == first:
            return (
                f"{KEPT_BY_DATA}: {where} had drawn random numbers, and was the same when it was read again from "
                f"others. It seems to be kept in {what}: then the epoch in which a worker reads a sample first decides "
                "how it is augmented. Keep samples as they are before augmentation."
            )
        return None


def bits(part: Any) -> list[bytes]:
    """All that can be compared of a sample; nothing of objects that are unknown."""
    structure = opened(part)
    if structure is not None:
        return [piece for name, inner in structure.parts for piece in (name.encode(), *bits(inner))]
    if isinstance(part, torch.Tensor):
        return [repr(part.dtype).encode(), all_bytes(part)] if part.layout is torch.strided else []
    if isinstance(part, PLAIN):
        return [repr(part).encode()]
    is_known = callable(getattr(part, "tobytes", None)) and str(getattr(part, "dtype", "")) != "object"
    return [all_bytes(part)] if is_known else []  # arrays and pictures


def marks(dataset: Any) -> Marks:
    """Marks of the attributes that code of the script reads back: of the data set, and of objects that it holds."""
    found: Marks = {}
    for one in _objects(dataset):
        kind: Any = type(one)
        read_back = _read_back(kind)
        for name, value in list(attributes(one).items()):
            if name in read_back:
                found[id(one), name] = f"`{name}` of {kind.__name__}", _mark(value)
    return found


def _objects(dataset: Any) -> Iterator[Any]:
    seen: set[int] = set()
    waiting = deque([dataset])
    while waiting and len(seen) < _MOST_OBJECTS:
        one = waiting.popleft()
        kind: Any = type(one)  # some objects run code of their own when they are asked for their class
        if issubclass(kind, list | tuple):
            waiting += one[:_MOST_ITEMS]
        elif id(one) not in seen and not issubclass(kind, _NO_HOLDERS):
            seen.add(id(one))
            yield one
            waiting += attributes(one).values()


def _mark(value: Any) -> Any:
    """Another one when the value has changed."""
    kind: Any = type(value)
    if is_own(value):
        return None
    if issubclass(kind, PLAIN):
        return repr(value)
    if issubclass(kind, torch.Tensor):
        return _Held(value), None if value.is_inference() else value._version
    if issubclass(kind, list | tuple | dict | set | deque):
        items = list(value.values() if issubclass(kind, dict) else value)
        return len(items), *((repr(one) if type(one) in PLAIN else _Held(one)) for one in items[-_MOST_ITEMS:])
    if kind.__name__ == "ndarray" and value.nbytes < _MOST_BYTES and value.dtype != object:
        return zlib.crc32(value.tobytes())
    return _Held(value)


@lru_cache(maxsize=256)
def _read_back(kind: type) -> frozenset[str]:
    """The attributes that the methods of a class of the script read, and do not only write."""
    names: set[str] = set()
    for base in kind.__mro__:
        if not _is_of_script(base):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        statements = [one.value for one in ast.walk(tree) if isinstance(one, ast.Expr)]
        methods = [one.func for one in statements if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)]
        written = {id(one.value) for one in methods if one.attr in _WRITES}
        assigns = [one for one in ast.walk(tree) if isinstance(one, ast.Assign)]
        own = {id(inner) for one in assigns for inner in ast.walk(one.value) if _name(inner) in map(_name, one.targets)}
        read = [one for one in ast.walk(tree) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Load)]
        names |= {one.attr for one in read if id(one) not in written | own}
    return frozenset(names)


def _is_of_script(kind: type) -> bool:
    """Whether it is no class of an installed package: to read their sources takes long."""
    if kind.__module__.split(".")[0] in _INSTALLED:
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return not isinstance(file, str) or "-packages" not in file


def _name(node: ast.AST) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else None
