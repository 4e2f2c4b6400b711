"""What the source of a file, or of a loop over lanes, shows of its variables and attributes: the statements in words.

Pure. An attribute counts of whatever object: of `self.tau *= 0.9` and of `meter.tau *= 0.9` it is `tau`.
"""

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from lockstep.script.source.lane_loops import loops_at
from lockstep.script.source.syntax import AnyFunction, in_words, is_outer

Found = Iterable[tuple[ast.stmt, ast.expr]]
"""Statements, each with the variable or attribute that it is found for."""


@dataclass(frozen=True)
class Statements:
    """The first statement of each kind that was looked for, by the names of attributes, and of variables."""

    attributes: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    def add(self, found: Found, is_shared: Callable[[str], bool]) -> None:
        """Variables only where they are shared with what runs later."""
        for statement, place in found:
            if isinstance(place, ast.Attribute):
                self.attributes.setdefault(place.attr, in_words(statement))
            elif isinstance(place, ast.Name) and is_shared(place.id):
                self.variables.setdefault(place.id, in_words(statement))


def shown_by_functions(functions: Iterable[AnyFunction], find: Callable[[AnyFunction], Found]) -> Statements:
    """What functions show of attributes, and of variables that stand outside of the function."""
    shown = Statements()
    for function in functions:
        shown.add(find(function), partial(is_outer, function=function))
    return shown


def shown_by_lanes(path: str, line: int, find: Callable[[ast.For], Found]) -> Statements:
    """What the body of the loop over lanes at this line shows."""
    shown = Statements()
    for loop in loops_at(path, line):
        shown.add(find(loop), lambda name: True)
    return shown
