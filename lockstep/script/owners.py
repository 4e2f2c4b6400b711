"""Whose code an object runs (the script's, torch's, another package's), and from which attributes that code goes on."""

import sys
from typing import Any

from lockstep.launch.traceback_lines import is_users
from lockstep.script.goes_on import attributes_that_go_on

_OWN = ("torch", "lockstep")


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
    carried = {name for file in files for name in attributes_that_go_on(file, over_passes=over_passes)}
    return {name: value for name, value in vars(holder).items() if name in carried}


def _file(module: str) -> str | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file if isinstance(file, str) else None
