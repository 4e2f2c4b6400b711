"""Where the script's own iterators stand, as text: `next(weights)` goes on from there, and begins anew with the script.

Python's iterators tell how much is left, or what they go over. Of a generator function of the script it is the line,
and the values of its variables on which its results depend, by its source. Of other iterators nothing is known: those
of loaders are put back by the run.
"""

import ast
import warnings
from collections.abc import Callable
from itertools import accumulate, chain, count, cycle, islice, starmap, takewhile
from operator import length_hint
from types import GeneratorType
from typing import Any

from lockstep.launch.channels.traceback_lines import is_users
from lockstep.script.call_site import copied_variables
from lockstep.script.source.computed import computed_from, gives
from lockstep.script.source.functions import Function, function_at
from lockstep.script.source.scopes import variable_named
from lockstep.script.source.syntax import walked

_SAMPLES: tuple[Any, ...] = ([], (), range(0), range(2**70), "", "é", b"", {}, {}.values(), {}.items(), set())
_PLACED: tuple[Any, ...] = tuple({type(iter(one)) for one in _SAMPLES} | {type(reversed([])), type(reversed({}))})
_AROUND = (zip, map, filter, enumerate, accumulate, chain, cycle, islice, starmap, takewhile)

Text = Callable[[Any], str | None]


def is_iterator(value: Any) -> bool:
    return isinstance(value, (*_PLACED, *_AROUND, count, GeneratorType))


def text_of_iterator(value: Any, text: Text) -> str | None:
    """Where it stands; None if that is not known. `text` gives plain values as text."""
    if isinstance(value, count):
        return repr(value)
    if isinstance(value, GeneratorType):
        return _text_of_generator(value, text) if is_users(value.gi_code.co_filename) else None
    if isinstance(value, _PLACED):
        return f"an iterator with {length_hint(value)} left"
    parts = _parts(value)
    inner = [words for one in parts if is_iterator(one) and (words := text_of_iterator(one, text)) is not None]
    if isinstance(value, cycle):  # it keeps what it has gone over
        inner += [f"{len(one)} kept" for one in parts if isinstance(one, list)]
    return f"{type(value).__name__} over {', '.join(inner)}" if inner else None


def _parts(value: Any) -> list[Any]:
    """What the iterator is made of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            parts = value.__reduce__()
        except TypeError:  # some iterators of later Pythons cannot be taken apart
            return []
    return [one for part in parts[1:] for one in (part if isinstance(part, tuple) else (part,))]


def _text_of_generator(generator: Any, text: Text) -> str | None:
    frame, code = generator.gi_frame, generator.gi_code
    if generator.gi_running:  # it is one of the calls under way, whose variables are looked at by themselves
        return None
    if frame is None:
        return "a generator at its end"
    source, variables = function_at(code.co_filename, code.co_name), copied_variables(frame)
    if is_iterator(generator.gi_yieldfrom):
        variables["yield from"] = generator.gi_yieldfrom
    texts = {
        name: text_of_iterator(one, text) if is_iterator(one) else text(one)
        for name, one in variables.items()
        if source is None or name == "yield from" or _matters(source, name)
    }
    shown = [f"{name}={words}" for name, words in texts.items() if words is not None]
    return f"a generator at line {frame.f_lineno}" + (f" with {', '.join(shown)}" if shown else "")


def _matters(source: Function, name: str) -> bool:
    """Whether what the generator function gives depends on the variable."""
    function = source.node
    if not isinstance(function, ast.FunctionDef):
        return True
    return gives(function, computed_from(walked(function), [variable_named(name, function)], source.functions()))
