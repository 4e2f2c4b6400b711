"""The lines of user code that an exception came through."""

import os
import re
import traceback
from pathlib import Path
from typing import NamedTuple

from lockstep import version

_STDLIB = os.path.dirname(os.__file__)
_PACKAGE = str(Path(version.__file__).parent)
_LAUNCHING = os.path.join(_PACKAGE, "launch")
_PROGRAMS = os.path.join(_PACKAGE, "programs")  # scripts that come with lockstep are scripts all the same
_CELLS = "<ipython-input-"  # what IPython calls lines that were typed at its prompt
_SCRIPTS = (_PROGRAMS + os.sep, _CELLS)
_NOT_SCRIPTS = ("<", _STDLIB + os.sep, _PACKAGE + os.sep)
_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
_MOST = 3

# What a data-loader worker's exception looks like once torch raises it again in the training process.
_RAISED_ELSEWHERE = re.compile(r"Caught (\w+) in .*\nOriginal Traceback \(most recent call last\):\n")
_PRINTED_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)(?:\n +(.*))?', re.MULTILINE)


class Frame(NamedTuple):
    """One call on the way to an error."""

    file: str
    line: int
    function: str
    source: str


def user_frames(exception: BaseException) -> tuple[Frame, ...]:
    """The innermost calls in user code, at most three, the innermost last.

    Frames of Python's library, of installed packages and of lockstep are left out, unless there are no others.
    """
    calls = [_frame(call) for call in traceback.extract_tb(exception.__traceback__)]
    if isinstance(exception, SyntaxError) and exception.filename:
        calls.append(Frame(exception.filename, exception.lineno or 0, "", (exception.text or "").strip()))
    return _keep_users(calls + list(_printed_frames(str(exception))))


def user_traceback(exception: BaseException) -> str:
    """The traceback as Python would print it, without the calls that led to the user's script."""
    calls = exception.__traceback__
    while calls is not None and _leads_to_script(calls.tb_frame.f_code.co_filename):
        calls = calls.tb_next
    return "".join(traceback.format_exception(type(exception), exception, calls))


def original(kind: str, message: str) -> tuple[str, str]:
    """The class and message of an exception as they were in the data-loader process that raised it."""
    match = _RAISED_ELSEWHERE.search(message)
    if match is None:
        return kind, message
    last = re.findall(rf"^(?:[\w.]+\.)?{match[1]}(?:: (.*))?$", message, re.MULTILINE)
    return (match[1], last[-1]) if last else (kind, message)


def _leads_to_script(file: str) -> bool:
    return file.startswith(_LAUNCHING + os.sep) or "runpy" in file


def _frame(call: traceback.FrameSummary) -> Frame:
    return Frame(call.filename, call.lineno or 0, call.name, (call.line or "").strip())


def _printed_frames(message: str) -> list[Frame]:
    match = _RAISED_ELSEWHERE.search(message)
    if match is None:
        return []
    printed = _PRINTED_FRAME.findall(message, match.end())
    return [Frame(file, int(line), function, source.strip()) for file, line, function, source in printed]


def _keep_users(calls: list[Frame]) -> tuple[Frame, ...]:
    users = [call for call in calls if is_users(call.file)]
    return tuple((users or calls)[-_MOST:])


def is_users(file: str) -> bool:
    """Whether a file is the user's: none of Python's library, of an installed package, or of lockstep."""
    if file.startswith(_SCRIPTS):
        return True
    if file.startswith(_NOT_SCRIPTS):
        return False
    return not any(folder in os.sep + file for folder in _INSTALLED)
