"""Values of a script as text, as snapshots have them: two processes have the same text where they have the same value.

Plain values are shown as they are; of tensors and NumPy's arrays the text is a digest of some elements.
"""

import dis
import hashlib
from argparse import Namespace
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.data.contents import contents
from lockstep.data.own_generators import OwnGenerator, is_own
from lockstep.data.structure import attributes, is_numpy_array
from lockstep.launch.channels.traceback_lines import is_users
from lockstep.script.owners import PLAIN, carried_attributes, is_of_script, is_torchs
from lockstep.script.restart.iterators import is_iterator, text_of_iterator

TENSORS = "tensors in "
"""Before the names of values of which the tensors are compared."""
GENERATOR = "a random generator"
OF_ARRAYS = "arrays "
PARAMETERS = "parameters "
ELSEWHERE = (nn.Module, Optimizer, Dataset, Sampler, DataLoader)
"""Types whose state is saved in other ways."""

_MOST_ITEMS = 1000
_MOST_DEPTH = 3
_MOST_TEXT = 100
_SAMPLED = 32
"""How many elements of a tensor are read."""
_MANY = (list, tuple, deque, set, frozenset, dict)
_GROWING = (list, deque, set, dict)


def texts_of(variables: Mapping[str, Any], put_back: Collection[int]) -> dict[str, str]:
    """The plain values and the tensors among variables, by their names. Modules whose id is in `put_back` have no
    numbers: those are put back (attributes.py)."""
    plain: dict[str, str] = {}
    for name, value in list(variables.items()):
        if name == "self" or name.startswith("__"):
            continue
        plain |= {f"{name}.{key}": repr(one) for key, one in _settings(value)}
        text = _text(value, _MOST_DEPTH, put_back)
        tensors = [] if id(value) in put_back else list(_tensors(value, _MOST_DEPTH))
        if text is not None:
            plain[name] = _short(text)
        if tensors:
            plain[TENSORS + name] = _of_module(value, tensors) if isinstance(value, nn.Module) else _digest(tensors)
    return plain


def _of_module(module: nn.Module, tensors: Iterable[Any]) -> str:
    """The digest of its parameters by itself: they are no memory that is written in every step."""
    parameters = [one for one in module.parameters() if _can_be_read(one)]
    return f"{PARAMETERS}{_digest(parameters)} {_digest(tensors)}" if parameters else _digest(tensors)


def _settings(value: Any) -> Iterator[tuple[str, int | float | bool | str]]:
    """Numbers, truth values and words in arguments, in a class, or in a file of the script's own: `args.beta`,
    `Config.beta`, `config.beta`."""
    is_own_class = isinstance(value, type) and is_of_script(value)
    is_own_file = isinstance(value, ModuleType) and is_users(str(getattr(value, "__file__", None) or "<none>"))
    if is_own_class or is_own_file or isinstance(value, Namespace | SimpleNamespace):
        for name, one in list(vars(value).items()):
            if type(one) in (int, float, bool, str) and not name.startswith("__"):
                yield name, one


def _text(value: Any, depth: int, put_back: Collection[int]) -> str | None:
    """The value as text, if it is plain. Modules whose id is in `put_back` have no numbers."""
    if value is None or isinstance(value, str | bool):
        return repr(value)
    if is_own(value):
        return f"{GENERATOR} ({OwnGenerator(value).digest()})"
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 and not value.is_meta else None
    if isinstance(value, Number):
        return repr(value.item()) if hasattr(value, "item") else repr(value)
    if is_iterator(value):
        return text_of_iterator(value, partial(_text, depth=max(0, depth - 1), put_back=put_back))
    if depth == 0 or (isinstance(value, _MANY) and len(value) > _MOST_ITEMS):
        return None
    if isinstance(value, dict):
        return _text_of_table(value, depth, put_back) if value else "{}"
    if isinstance(value, nn.Module):
        if is_torchs(value):
            return text_of(value)
        carried = carried_attributes(value)
        if id(value) in put_back:
            carried = {name: one for name, one in carried.items() if type(one) not in PLAIN}
        return f"{type(value).__name__}{_text_of_table(carried, depth, put_back) or ''}"
    if isinstance(value, FunctionType):
        return f"{text_of(value)}{_text_of_table(_kept_by(value), depth, put_back) or ''}"
    if isinstance(value, partial):
        return text_of(value)
    if isinstance(value, _MANY):
        texts = [text for one in value if (text := _text(one, depth - 1, put_back)) is not None]
        ordered = sorted(texts) if isinstance(value, set | frozenset) else texts
        return f"[{', '.join(ordered)}]" if len(texts) == len(value) else None
    if is_object_of_script(value):
        return _text_of_table(attributes(value), depth, put_back)
    return type(value).__qualname__ if hasattr(value, "state_dict") or callable(value) else None


def _text_of_table(table: Mapping[Any, Any], depth: int, put_back: Collection[int]) -> str | None:
    """Of the entries that are plain; None if there are none."""
    texts = {name: _text(one, depth - 1, put_back) for name, one in list(table.items())}
    known = [f"{name}={text}" for name, text in texts.items() if text is not None]
    return f"({', '.join(known)})" if known else None


def _kept_by(function: FunctionType) -> Mapping[str, Any]:
    """What a function keeps from call to call: attributes of its own, lists and tables that are defaults of its
    arguments, and variables of the function around it that it sets, or that hold such."""
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    given = {**dict(zip(arguments[::-1], defaults[::-1], strict=False)), **(function.__kwdefaults__ or {})}
    kept = vars(function) | {name: one for name, one in given.items() if isinstance(one, _GROWING)}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is not set yet
            if name in _set_around(function.__code__) or isinstance(cell.cell_contents, _GROWING):
                kept[name] = cell.cell_contents
    return kept


@lru_cache(maxsize=1024)
def _set_around(code: CodeType) -> set[str]:
    """The variables of functions around it that its code sets."""
    return {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_DEREF"} & set(code.co_freevars)


def _tensors(value: Any, depth: int) -> Iterator[Any]:
    """Those of more than one element in the value, and NumPy's arrays; lists that are very long are no part of a
    training's state."""
    if isinstance(value, torch.Tensor):
        if _can_be_read(value):
            yield value
    elif is_numpy_array(value):
        if value.size and not value.dtype.hasobject:
            yield value
    elif isinstance(value, nn.Module):
        if "_parameters" not in vars(value):  # it was not made to its end
            return
        inside = (one for module in value.modules() for one in carried_attributes(module).values())
        tensors = (one for one in inside if isinstance(one, torch.Tensor))
        yield from filter(_can_be_read, chain(value.parameters(), value.buffers(), tensors))
    elif depth > 0 and isinstance(value, list | tuple | deque | dict) and len(value) <= _MOST_ITEMS:
        for one in list(value.values() if isinstance(value, dict) else value):
            yield from _tensors(one, depth - 1)
    elif depth > 0 and is_object_of_script(value):
        yield from _tensors(attributes(value), depth - 1)


def _can_be_read(tensor: torch.Tensor) -> bool:
    """Whether it has elements, in plain memory."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return plain and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 1


def _digest(tensors: Iterable[Any]) -> str:
    flat = [tensor.reshape(-1) for tensor in tensors]
    words = "" if any(isinstance(one, torch.Tensor) for one in flat) else OF_ARRAYS
    return words + contents([one[:: max(1, len(one) // _SAMPLED)] for one in flat])


def is_object_of_script(value: Any) -> bool:
    """Whether it is an object of a class of the script, whose state is saved in no other way."""
    return is_of_script(type(value)) and not isinstance(value, ELSEWHERE)


def _short(text: str) -> str:
    """A long text is cut, and gets a digest of the whole."""
    text = " ".join(text.split())
    if len(text) <= _MOST_TEXT:
        return text
    return f"{text[:_MOST_TEXT]}... ({hashlib.blake2b(text.encode(), digest_size=6).hexdigest()})"


def text_of(value: Any) -> str | None:
    """A plain value, the kind of a function or an object, or the length of a list; None for tensors."""
    if type(value) in PLAIN:
        return repr(value)
    if isinstance(value, _MANY):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, partial):
        return f"partial({', '.join(_parts(value))})"
    if isinstance(value, FunctionType):
        return f"{value.__qualname__} (line {value.__code__.co_firstlineno})"
    if isinstance(value, MethodType | BuiltinFunctionType | type):
        return value.__qualname__
    if isinstance(value, nn.Module) and type(value).__module__.startswith("torch."):
        return f"{type(value).__name__}({', '.join(_plain_attributes(value))})"
    return type(value).__qualname__


def _parts(one: "partial[Any]") -> Iterator[str]:
    yield from (str(text_of(value)) for value in (one.func, *one.args))
    yield from (f"{name}={text_of(value)}" for name, value in one.keywords.items())


def _plain_attributes(module: nn.Module) -> Iterator[str]:
    for name, value in vars(module).items():
        if type(value) in PLAIN and not name.startswith("_") and name != "training":
            yield f"{name}={value!r}"
