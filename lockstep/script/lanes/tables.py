"""Rows of a table that a lane writes by an index: `bank[index] = features.detach()`. Pure.

# Note [Rows of a table]
# A table with a row for each sample (a memory bank, the last loss of each sample) is written by lanes and read later,
# maybe in the next epoch:
#
#     for x, index in run.lanes(batch):
#         bank[index] = model(x).detach()
#
# Each worker has the rows of its own lanes only. The statement does not go on from what is
# there, so nothing else shows it. A row is written by an index that comes from the lane's data, or, in a function, from
# its arguments. What is written where a test has found nothing in the table is a cache, and no matter. Something else
# must read the table, and every lane must change it: a dictionary must grow, since hooks keep what is only looked at
# under the same few keys.
"""

import ast
import linecache
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache

from lockstep.script.source.computed import computed_from
from lockstep.script.source.statements import Statements, shown_by_functions, shown_by_lanes
from lockstep.script.source.syntax import (
    AnyFunction,
    function_around,
    functions_of,
    given_variables,
    mentions,
    names_read,
    names_set,
    nodes_of,
    own_statements,
    parsed,
    targets_of,
    variables_in,
    walked,
)

_BY_ARGUMENT = frozenset(
    {"index_copy_", "index_fill_", "index_put_", "masked_scatter_", "put_", "scatter_", "update", "__setitem__"}
)
"""Methods that write rows, whose arguments say which."""
_BY_VIEW = frozenset({"copy_", "fill_", "zero_"})
_SAME_MEMORY = frozenset({"data", "detach", "numpy", "view", "flatten", "squeeze", "unsqueeze", "t"})


_METHODS = "|".join(_BY_ARGUMENT | _BY_VIEW | _SAME_MEMORY)
_INDEX = r"\[(?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*\]"
"""An index, with indices in it."""
_WRITES = rf"(?:{_INDEX}\s*)+[-+*/@%&|^<>]*=(?!=)|(?:{_INDEX}\s*)?\.\s*(?:{_METHODS})\b"
_WRITTEN = re.compile(rf"\b([^\W\d]\w*)(?=\s*(?:{_WRITES}))")


@dataclass(frozen=True)
class RowWrite:
    """A statement that writes rows of `table`, by the index `keys`."""

    statement: ast.stmt
    table: ast.Name | ast.Attribute
    keys: tuple[ast.expr, ...]


def may_have_rows(path: str, name: str) -> bool:
    """Whether the text of a file has such a statement. To parse a file takes many times as long as to search it, and a
    script may have hundreds of files."""
    return name in _names_with_rows(path)


@lru_cache(maxsize=1024)
def _names_with_rows(path: str) -> Set[str]:
    return frozenset(_WRITTEN.findall("".join(linecache.getlines(path))))


@lru_cache(maxsize=1024)
def rows_in(path: str) -> Statements:
    """What has rows that functions of a file write."""
    nodes = nodes_of(path)

    def find(function: AnyFunction) -> Iterator[tuple[ast.stmt, ast.expr]]:
        writes = _by_index(function.body, given_variables(function))
        return ((one.statement, one.table) for one in writes if _is_read(nodes, one.table))

    return shown_by_functions(functions_of(path), find)


@lru_cache(maxsize=1024)
def rows_of_lanes(path: str, line: int) -> Statements:
    """What has rows that the body of the loop over lanes at this line writes."""

    def find(loop: ast.For) -> Iterator[tuple[ast.stmt, ast.expr]]:
        tree = parsed(path)
        assert tree is not None
        around, own = walked(function_around(tree, line)), names_set(loop)
        for write in _by_index(loop.body, variables_in(loop.target)):
            if isinstance(write.table, ast.Attribute):
                is_read = _is_read(walked(tree), write.table)
            else:
                is_read = write.table.id not in own and _is_read(around, write.table, but=walked(loop))
            if is_read:
                yield write.statement, write.table

    return shown_by_lanes(path, line, find)


def _by_index(body: list[ast.stmt], given: set[str]) -> Iterator[RowWrite]:
    """Those whose index comes from what is `given`, and that fill no cache."""
    nodes = list(own_statements(body))
    computed = computed_from(nodes, given)
    for write in (one for node in nodes for one in _writes(node)):
        if any(mentions(key, computed) for key in write.keys) and not _is_of_cache(nodes, write):
            yield write


def _writes(node: ast.AST) -> Iterator[RowWrite]:
    if isinstance(node, ast.Assign | ast.AugAssign):
        for target in targets_of(node):
            yield from _write(node, target)
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        assert isinstance(node, ast.Expr)
        if call.func.attr in _BY_ARGUMENT:
            yield from _write(node, call.func.value, [key for one in call.args for key in _keys_of(one)])
        elif call.func.attr in _BY_VIEW:
            yield from _write(node, call.func.value)


def _write(statement: ast.stmt, target: ast.expr, keys: Sequence[ast.expr] = ()) -> Iterator[RowWrite]:
    """Of `self.bank.data[index]` as rows of `self.bank.data` and of `self.bank`: `data` may be the script's own."""
    found = list(keys)
    while True:
        if isinstance(target, ast.Subscript):
            parts = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
            found += [part for part in parts if not isinstance(part, ast.Slice)]
            target = target.value
            continue
        if isinstance(target, ast.Name | ast.Attribute):
            yield RowWrite(statement, target, tuple(found))
        if isinstance(target, ast.Call):
            target = target.func
        if not isinstance(target, ast.Attribute) or target.attr not in _SAME_MEMORY:
            return
        target = target.value


def _keys_of(argument: ast.expr) -> list[ast.expr]:
    """Of `{"loss": loss}` the keys."""
    return [key for key in argument.keys if key is not None] if isinstance(argument, ast.Dict) else [argument]


def _is_of_cache(nodes: Sequence[ast.AST], write: RowWrite) -> bool:
    """Whether it stands where a test, or an exception, tells what the table holds under a key."""
    table = ast.unparse(write.table)
    around = [one for one in nodes if isinstance(one, ast.If | ast.Try) and write.statement in walked(one)]
    found = [one for one in nodes if isinstance(one, ast.Assign) and _looks_up(one.value, table)]
    names = names_set(*(target for one in found for target in targets_of(one)))
    parts = (part for one in around for part in ([one.test] if isinstance(one, ast.If) else one.body))
    return any(names_read(part) & names or any(_looks_up(one, table) for one in ast.walk(part)) for part in parts)


def _looks_up(node: ast.AST, table: str) -> bool:
    """`key in table`, `table.get(key)`, `table[key]`."""
    if isinstance(node, ast.Compare):
        return any(isinstance(one, ast.In | ast.NotIn) for one in node.ops) and table in map(
            ast.unparse, node.comparators
        )
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) == f"{table}.get"
    return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == table


def _is_read(nodes: Iterable[ast.AST], table: ast.Name | ast.Attribute, but: Iterable[ast.AST] = ()) -> bool:
    """Whether something else than the writing of rows reads the variable or attribute, but for some of the nodes."""
    name = table.id if isinstance(table, ast.Name) else table.attr
    places = [one for one in nodes if isinstance(one, ast.Name | ast.Attribute) and isinstance(one.ctx, ast.Load)]
    left_out = {id(one) for one in but}
    left_out |= {id(one) for node in nodes for write in _writes(node) for one in ast.walk(write.table)}
    return any(
        (one.id if isinstance(one, ast.Name) else one.attr) == name and id(one) not in left_out for one in places
    )
