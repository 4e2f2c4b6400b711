"""Whose code an object runs (the script's, torch's, another package's), and what that code does to its attributes."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.data.structure import attributes
from lockstep.launch.channels.traceback_lines import is_users
from lockstep.script.source.goes_on import gone_on_in
from lockstep.script.source.methods import Method, methods_of

PLAIN = (int, float, bool, str, type(None))
"""The types of values that are put back, and shown as they are."""

_OWN = ("torch", "lockstep")
_UNREAD = sys.stdlib_module_names.union(_OWN)
"""Packages whose classes are not looked into. To read the source of Python's `typing` takes 50 ms."""
_NO_SETTINGS = (nn.Module, Optimizer, Dataset, Sampler, DataLoader, torch.Tensor, type)


def file_of(kind: type) -> str | None:
    """The file that a class stands in, if it does in one."""
    return _file(kind.__module__)


def is_of_script(kind: type) -> bool:
    file = file_of(kind)
    return file is not None and is_users(file)


def is_torchs(thing: Any) -> bool:
    """Whether its class is one of torch's, or of lockstep's."""
    return type(thing).__module__.split(".")[0] in _OWN


def carried_attributes(holder: Any, *, over_passes: bool = False) -> dict[str, Any]:
    """The attributes of an object from which the code of its class, or the script itself, goes on."""
    files = {file for file in (file_of(type(holder)), _file("__main__")) if file is not None and is_users(file)}
    carried = {name for file in files for name in gone_on_in(file, over_passes).attributes}
    return {name: value for name, value in vars(holder).items() if name in carried}


def are_settings(value: Any) -> bool:
    """A dictionary, a namespace, a configuration of some library, or an object of the script's own."""
    kind = type(value)
    if isinstance(value, dict | Namespace | SimpleNamespace):
        return True
    is_own = is_of_script(kind) and not isinstance(value, _NO_SETTINGS)
    return bool(attributes(value)) and (is_own or kind.__name__.endswith("Config"))


def own_methods(holder: Any) -> Iterator[Method]:
    """The methods of an object's classes, as far as these are not Python's, torch's or lockstep's."""
    for kind in type(holder).__mro__:
        if kind.__module__.split(".")[0] not in _UNREAD and (file := file_of(kind)) is not None:
            yield from methods_of(file, kind.__name__)


def _file(module: str) -> str | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file if isinstance(file, str) else None
