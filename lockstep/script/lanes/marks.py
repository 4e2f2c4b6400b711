"""Where the values stand that the code of a lane may change, each with a mark that is another one when it has changed.

They are variables of the script's calls and files, and attributes of its objects and modules.
"""

import gc
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.data.own_generators import OwnGenerator, is_own
from lockstep.data.structure import attributes
from lockstep.gradients.fingerprint import fingerprints
from lockstep.launch.channels.traceback_lines import is_users
from lockstep.launch.worker.load_once import loaded_by_script
from lockstep.script.call_site import look_into
from lockstep.script.owners import file_of, is_torchs

_UNCHANGING = frozenset({str, bytes, type, FunctionType, BuiltinFunctionType, ModuleType})
"""Most variables of a file. They have no state that is looked at, and no mark."""
_WITHOUT_OWN = _UNCHANGING - {type} | {int, float, bool, type(None)}
"""Types whose objects have no attributes of the script."""
_NUMBERS = (int, float, complex)
_MANY = (list, tuple, dict, set, deque)
_MOST_ITEMS = 100
_MOST_ARRAY_BYTES = 16 << 20
_ELSEWHERE = (Optimizer, DataLoader, Dataset, Sampler, ModuleType)
"""Types that are no objects of a lane, or whose state is looked at in other ways."""
NOTHING = "nothing"
"""The mark of None: what is made once and kept is None before."""

IsTable = Callable[[str], bool]
"""Whether rows of what has this name are written. See Note [Rows of a table] in tables.py."""
TablesOf = Callable[[str, bool], IsTable]
"""The same for a file: for attributes of objects of its classes, or for its variables."""


@dataclass(frozen=True)
class KeptPlace:
    """Where a value stands: a variable, or an attribute of an object whose variable or class is `holder`."""

    holder: str
    name: str
    owner: int
    """The object's id."""
    file: str
    """That of the variable, or of the object's class."""
    kind: str = ""
    """The object's class."""


@dataclass(frozen=True)
class GeneratorMark:
    """A generator of the script's own. See Note [Generators of the script's own] in own_generators.py."""

    generator: int
    """Its id."""
    digest: str


@dataclass(frozen=True)
class DictionaryMark:
    length: int
    values: tuple[Any, ...]


def all_modules() -> list[nn.Module]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]


def marks_in(
    frame: FrameType, modules: list[nn.Module], replicated: set[int], tables: TablesOf
) -> dict[KeptPlace, Any]:
    """The marks of all that stands in the script's variables, and in attributes of its objects and of `modules`."""
    variables = _variables(frame)
    named = [(name, one) for _, values in variables for name, one in values.items()]
    objects = {id(one): (name, one) for name, one in [*((type(m).__name__, m) for m in modules), *named]}
    marks = {}
    for file, values in variables:
        found = _marked(values, tables(file, False))
        marks.update({KeptPlace("", name, 0, file): mark for name, mark in found})
    for owner, (holder, one) in objects.items():
        for file, held in _attributes(one, replicated):
            found = _marked(held, tables(file, True), only_whole=not is_users(file))
            marks.update({KeptPlace(holder, name, owner, file, type(one).__name__): mark for name, mark in found})
    return marks


def marks_of_buffers(module: nn.Module, tables: TablesOf) -> dict[str, Any]:
    """Kernels of torch's layers write statistics without a sign, and count batches by an ordinary addition."""
    file = file_of(type(module))
    is_table = no_table if file is None else tables(file, True)
    buffers = vars(module).get("_buffers", {})  # one that was not made to its end has none
    named = [(name, one) for name, one in buffers.items() if one is not None and not one.is_inference()]
    return {name: _mark(one, name, is_table) for name, one in named}


def _attributes(one: Any, replicated: set[int]) -> list[tuple[str, Mapping[str, Any]]]:
    """Those of an object of the script, and of its class; of another package's, those of a module of its own."""
    if type(one) in _WITHOUT_OWN:
        return []
    file = file_of(one if isinstance(one, type) else type(one))
    if isinstance(one, type):
        return [(file, vars(one))] if file is not None and is_users(file) else []
    if file is None or isinstance(one, _ELSEWHERE) or is_torchs(one):
        return []
    own = (file, attributes(one))
    if is_users(file):
        return [(file, vars(type(one))), own]
    return [own] if isinstance(one, nn.Module) and id(one) not in replicated else []


def _variables(frame: FrameType) -> list[tuple[str, Mapping[str, Any]]]:
    """The variables of the script's calls, and of its files, by file."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for (path, name), values in look_into(frame, dict).items():
        if not any(type(one.get("self")).__name__ == name for file, one in found if file == path):
            found.append((path, values))  # and not the attributes of `self`, which is a variable
    return [*found, *((file, dict(vars(module))) for file, module in users_modules(len(sys.modules)))]


@lru_cache(maxsize=1)
def users_modules(_: int) -> list[tuple[str, ModuleType]]:
    """Each with its file. They are looked for again when another number of modules is loaded."""
    modules = [
        one for one in loaded_by_script() if isinstance(one, ModuleType) and not one.__name__.startswith("torch.")
    ]
    named = [(getattr(module, "__file__", None), module) for module in modules]
    return [(file, one) for file, one in named if isinstance(file, str) and is_users(file)]


def no_table(_: str) -> bool:
    return False


def _marked(values: Mapping[str, Any], is_table: IsTable, *, only_whole: bool = False) -> Iterator[tuple[str, Any]]:
    for name, value in list(values.items()):
        if not name.startswith("__") and (mark := _mark(value, name, is_table, only_whole)) is not None:
            yield name, mark


def _mark(value: Any, name: str = "", is_table: IsTable = no_table, only_whole: bool = False) -> Any:
    """Something that is another one when the value has changed; None where it is not looked at.

    Of a table every row counts, however it is written.
    """
    kind = type(value)
    if kind is int:
        return value
    if only_whole or kind in _UNCHANGING:
        return None
    if value is None:
        return NOTHING
    if isinstance(value, _NUMBERS):
        return repr(value)
    if isinstance(value, torch.Tensor):
        rows = (int(fingerprints({"": value})),) if value.layout == torch.strided and is_table(name) else ()
        return id(value), None if value.is_inference() else value._version, *rows
    if isinstance(value, _MANY):
        most = None if len(value) > _MOST_ITEMS and is_table(name) else _MOST_ITEMS
        inner = islice(value.values() if isinstance(value, dict) else value, most)
        marks = tuple(_mark(one) for one in inner if not isinstance(one, _MANY))
        return DictionaryMark(len(value), marks) if isinstance(value, dict) else (len(value), *marks)
    if kind.__name__ == "ndarray" and kind.__module__ == "numpy":
        is_looked_at = value.dtype != object and (value.nbytes <= _MOST_ARRAY_BYTES or is_table(name))
        return zlib.crc32(value.tobytes()) if is_looked_at else None
    return GeneratorMark(id(value), OwnGenerator(value).digest()) if is_own(value) else None
