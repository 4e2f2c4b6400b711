"""The line of the script that called into lockstep, and the variables of the script's own calls there.

# Note [Looking into frames]
# Before Python 3.13 a function's `f_locals` is a dictionary that keeps its values until it is filled again: it would
# keep tensors alive that the script has deleted. So it is emptied when it was copied, unless the script has read it too
# (`locals()`). That of a module or of a class body is the namespace itself, and is left alone.
"""

import dis
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any, TypeVar

from lockstep import version
from lockstep.data.structure import attributes
from lockstep.launch.channels.traceback_lines import is_users
from lockstep.script.source.lane_loops import hands_on

Found = TypeVar("Found")

MOST_FRAMES = 12
"""How many of the script's calls are looked into, from the innermost."""

_PACKAGE = os.path.dirname(os.path.abspath(version.__file__)) + os.sep
_PROGRAMS = _PACKAGE + "programs" + os.sep
_WHOLE = frozenset({int, bool})
_LARGEST = 2**53
_OURS = 3
"""References to a frame's variables that the script has not read: the frame's, ours, and that of the count itself."""


@dataclass(frozen=True)
class Site:
    path: str
    line: int

    @property
    def file(self) -> str:
        return os.path.basename(self.path)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


WholeNumbers = Mapping[tuple[str, str], Mapping[str, int]]
"""Whole numbers and truth values by their names, for each function, or class of attributes: `(path, function)`."""


def calling_frame() -> FrameType:
    """The innermost call that is not lockstep's own, which called into lockstep."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame or sys._getframe(1)


def looping_frame(frame: FrameType) -> FrameType:
    """The call that runs through the lanes for which `frame` asks: this one, or one around it that it hands them to."""
    for call in _users_calls(frame):
        if not hands_on(call.f_code.co_filename, call.f_lineno):
            return call
    return frame


def is_for_statement(frame: FrameType | None) -> bool:
    """Whether a `for` statement asks for what this call gives, through any generator functions around it."""
    while frame is not None:
        instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if not instruction.startswith(("FOR_ITER", "SEND")):  # the other one is that of `yield from`
            return False
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return True
        frame = frame.f_back
    return False


def site_of(frame: FrameType) -> Site:
    return Site(frame.f_code.co_filename, frame.f_lineno)


def whole_numbers(frame: FrameType) -> WholeNumbers:
    """The whole numbers in the variables of the script's own calls, and in the attributes of their `self`."""
    return look_into(frame, _only_whole)


def look_into(frame: FrameType, read: Callable[[Mapping[str, Any]], Found]) -> dict[tuple[str, str], Found]:
    """The results of `read` on the variables of the script's own calls, and on the attributes of their `self`."""
    results: dict[tuple[str, str], Found] = {}
    for call in _users_calls(frame):
        code, variables = call.f_code, copied_variables(call)
        results.setdefault((code.co_filename, code.co_name), read(variables))
        owner = variables.get("self")
        if owner is not None:
            results.setdefault((code.co_filename, type(owner).__name__), read(attributes(owner)))
    return results


def copied_variables(frame: FrameType) -> dict[str, Any]:
    """A call's variables, of which the frame keeps no copy. See Note [Looking into frames]."""
    variables = frame.f_locals
    copy = dict(variables)
    is_its_own = isinstance(variables, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_its_own and sys.getrefcount(variables) <= _OURS:
        variables.clear()
    return copy


def _only_whole(variables: Mapping[str, Any]) -> dict[str, int]:
    return {name: value for name, value in variables.items() if type(value) in _WHOLE and -_LARGEST < value < _LARGEST}


def _users_calls(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(MOST_FRAMES):
        while frame is not None and not _is_users(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return
        yield frame
        frame = frame.f_back


@lru_cache(maxsize=1024)
def _is_ours(path: str) -> bool:
    return path.startswith(_PACKAGE) and not path.startswith(_PROGRAMS)


@lru_cache(maxsize=1024)
def _is_users(path: str) -> bool:
    return is_users(path)
