"""What code hands on to its own next run by several statements: `h = self.h`, and later `self.h = h.detach()`. Pure.

# Note [Handed on by a detour]
# Code that reads something before it sets it hands it on to its next run. Much of that is harmless: a time that is
# printed, a mask that is made once and kept. So the source must also show that it matters: the training depends on it,
# or the result of the function, or what is written is computed from it.
#
#     if loss < best: best = loss       # `best` is read before it is set,
#     run.backward(loss / best)         # and goes into the loss: the next lane goes on from it
#
# What is made once and kept looks the same there; it is known by its value, which no later lane changes.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from lockstep.script.source.computed import computed_from
from lockstep.script.source.dependence import dependence
from lockstep.script.source.functions import Function
from lockstep.script.source.scopes import variable
from lockstep.script.source.statements import Statements, shown_by_functions, shown_by_lanes
from lockstep.script.source.syntax import (
    bare,
    functions_of,
    mentions,
    names_set,
    own_statements,
    targets_of,
    unpacked,
    written,
)
from lockstep.script.source.uses import Uses


@lru_cache(maxsize=1024)
def handed_on_in(path: str) -> Statements:
    """What functions of a file hand on."""
    return shown_by_functions(functions_of(path), lambda function: handed_on(function.body))


def handed_on_by_lanes(path: str, line: int) -> Statements:
    """What the body of the loop over lanes at this line hands on."""
    return shown_by_lanes(path, line, _by_body)


def _by_body(loop: ast.For) -> Iterator[tuple[ast.stmt, ast.expr]]:
    own = names_set(loop.target)
    return ((one, its) for one, its in handed_on(loop.body) if not (isinstance(its, ast.Name) and its.id in own))


def handed_on(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.expr]]:
    """The statements that write what the body hands on to its next run, each with what it writes."""
    nodes = list(own_statements(body))
    for write in _writes(nodes):
        name = variable(write.target)
        if name is not None and Uses(name, by_element=True).read_first(body) and _matters(body, nodes, write, name):
            yield write.statement, write.target


@dataclass(frozen=True)
class Write:
    """Something is written: `target`, or an element of it, and the value that it is given."""

    statement: ast.stmt
    target: ast.expr
    value: ast.expr


def _writes(nodes: Iterable[ast.AST]) -> Iterator[Write]:
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for place, value in (pair for target in targets_of(node) for pair in _paired(target, node.value)):
                yield Write(node, bare(place), value)


def _paired(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Of `a, b = c, d` the parts, each with its own value."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return [pair for one, its in zip(target.elts, value.elts, strict=True) for pair in _paired(one, its)]
    return [(part, value) for part in unpacked(target)]


def _matters(body: list[ast.stmt], nodes: Sequence[ast.AST], write: Write, name: str) -> bool:
    """See Note [Handed on by a detour]."""
    tainted = computed_from(nodes, [name])
    results = [node.value for node in nodes if isinstance(node, ast.Return)]
    if any(value is not None and mentions(value, tainted) for value in (*results, write.value)):
        return True
    is_named = written(write.target) is not None
    source = Function(ast.Module(body, []))
    return is_named and dependence(source, ast.unparse(write.target), in_calls=False) is not None
