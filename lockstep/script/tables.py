"""Rows of a table that a lane writes by an index: `bank[index] = features.detach()`. Pure.

# Note [Rows of a table]
# A table with a row for each sample (a memory bank, the last loss of each sample) is written by lanes and read later,
# maybe in the next epoch. Each worker has the rows of its own lanes only. The statement does not go on from what is
# there, so nothing else shows it. A row is written by an index that comes from the lane's data, or, in a function, from
# its arguments. What is written where a test has found nothing in the table is a cache, and no matter. Something else
# must read the table, and every lane must change it: a dictionary must grow, since hooks keep what is only looked at
# under the same few keys.
"""

import ast
import linecache
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache

from lockstep.script.body import names_in, own_statements
from lockstep.script.dependence import parsed, walked
from lockstep.script.goes_on import FUNCTIONS, function_around, functions_of, in_words, loops_at

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
def attributes_with_rows(path: str) -> Mapping[str, str]:
    """Attributes, of whatever object, whose rows the file's functions write; each with the statement in words."""
    tree, found = parsed(path), dict[str, str]()
    for function in functions_of(tree):
        for write in _by_index(function.body, _arguments(function)):
            if isinstance(write.table, ast.Attribute) and _is_read(tree, write.table.attr):
                found.setdefault(write.table.attr, in_words(write.statement))
    return found


@lru_cache(maxsize=1024)
def outer_names_with_rows(path: str) -> Mapping[str, str]:
    """The same for variables that stand outside of the function."""
    tree, found = parsed(path), dict[str, str]()
    for function in functions_of(tree):
        own = _arguments(function) | names_in(function.body, ast.Store)
        for write in _by_index(function.body, _arguments(function)):
            if isinstance(write.table, ast.Name) and write.table.id not in own and _is_read(tree, write.table.id):
                found.setdefault(write.table.id, in_words(write.statement))
    return found


@lru_cache(maxsize=1024)
def rows_of_lanes(path: str, line: int) -> Mapping[str, str]:
    """The same for variables and attributes whose rows the body of the loop over lanes at this line writes."""
    tree, found = parsed(path), dict[str, str]()
    for loop in loops_at(path, line):
        assert tree is not None
        own = names_in([loop], ast.Store)
        for write in _by_index(loop.body, names_in([loop.target], ast.Store)):
            table = write.table
            if isinstance(table, ast.Attribute):
                is_read = _is_read(tree, table.attr)
            else:
                is_read = table.id not in own and _is_read(function_around(tree, line), table.id, but=loop)
            if is_read:
                found.setdefault(
                    table.attr if isinstance(table, ast.Attribute) else table.id, in_words(write.statement)
                )
    return found


def _by_index(body: list[ast.stmt], given: set[str]) -> Iterator[RowWrite]:
    """Those whose index comes from what is `given`, and that fill no cache."""
    nodes = list(own_statements(body))
    computed = _computed_from(nodes, given)
    for write in (one for node in nodes for one in _writes(node)):
        if names_in(write.keys, ast.Load) & computed and not _is_of_cache(nodes, write):
            yield write


def _writes(node: ast.AST) -> Iterator[RowWrite]:
    if isinstance(node, ast.Assign | ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from _write(node, target)
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        assert isinstance(node, ast.Expr)
        if call.func.attr in _BY_ARGUMENT:
            yield from _write(node, call.func.value, [key for one in call.args for key in _keys_of_argument(one)])
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


def _keys_of_argument(argument: ast.expr) -> list[ast.expr]:
    """Of `{"loss": loss}` the keys."""
    return [key for key in argument.keys if key is not None] if isinstance(argument, ast.Dict) else [argument]


def _computed_from(nodes: Sequence[ast.AST], given: set[str]) -> set[str]:
    """The names given, and all that are assigned something, or run over something, in which one of them is read."""
    computed = set(given)
    while True:
        assigns = [(node.targets, node.value) for node in nodes if isinstance(node, ast.Assign)]
        loops = [([node.target], node.iter) for node in nodes if isinstance(node, ast.For | ast.comprehension)]
        new = [targets for targets, value in (*assigns, *loops) if names_in([value], ast.Load) & computed]
        names = {name for targets in new for name in names_in(targets, ast.Store)}
        if names <= computed:
            return computed
        computed |= names


def _is_of_cache(nodes: Sequence[ast.AST], write: RowWrite) -> bool:
    """Whether it stands where a test, or an exception, tells what the table holds under a key."""
    table = ast.unparse(write.table)
    around = [node for node in nodes if isinstance(node, ast.If | ast.Try) and _holds(node, write.statement)]
    looked_up = [node for node in nodes if isinstance(node, ast.Assign) and _looks_up(node.value, table)]
    names = names_in([target for node in looked_up for target in node.targets], ast.Store)
    return any(
        any(_looks_up(one, table) for one in ast.walk(part)) or names_in([part], ast.Load) & names
        for node in around
        for part in ([node.test] if isinstance(node, ast.If) else node.body)
    )


def _looks_up(node: ast.AST, table: str) -> bool:
    """`key in table`, `table.get(key)`, `table[key]`."""
    if isinstance(node, ast.Compare):
        return any(isinstance(one, ast.In | ast.NotIn) for one in node.ops) and table in map(
            ast.unparse, node.comparators
        )
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) == f"{table}.get"
    return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == table


def _holds(node: ast.AST, statement: ast.stmt) -> bool:
    return any(one is statement for one in walked(node))


def _is_read(part: ast.AST | None, name: str, but: ast.AST | None = None) -> bool:
    """Whether something else than the writing of rows, and stands not in `but`, reads the variable or attribute."""
    nodes = () if part is None else walked(part)
    left_out = {id(one) for one in (() if but is None else walked(but))}
    left_out |= {id(one) for node in nodes for write in _writes(node) for one in ast.walk(write.table)}
    return any(
        isinstance(node.ctx, ast.Load) and (node.id if isinstance(node, ast.Name) else node.attr) == name
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in left_out
    )


def _arguments(function: ast.AST) -> set[str]:
    assert isinstance(function, FUNCTIONS)
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return {one.arg for one in every if one.arg not in ("self", "cls")}
