"""What code hands on to its own next run by several statements: `h = self.h`, and later `self.h = h.detach()`. Pure.

# Note [Handed on by a detour]
# Code that reads something before it sets it, and writes it, hands it on to its next run. Much of that is harmless: a
# time that is printed, a mask that is made once and kept. So the source must also show that it matters: the training
# depends on it, or the result of the function, or what is written is computed from it. What is made once and kept looks
# the same there; it is known by its value, which no later lane changes.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from lockstep.script.body import names_in, own_statements
from lockstep.script.dependence import Function, own_names, parsed, written
from lockstep.script.goes_on import bare, declared_outside, functions_of, in_words, loops_at


@lru_cache(maxsize=1024)
def attributes_handed_on(path: str) -> Mapping[str, str]:
    """Attributes, of whatever object, that a function of the file hands on; each with the statement in words."""
    found: dict[str, str] = {}
    for function in functions_of(parsed(path)):
        for statement, target in handed_on(function.body):
            if isinstance(target, ast.Attribute):
                found.setdefault(target.attr, in_words(statement))
    return found


@lru_cache(maxsize=1024)
def outer_names_handed_on(path: str) -> Mapping[str, str]:
    """The same for variables that stand outside of the function."""
    found: dict[str, str] = {}
    for function in functions_of(parsed(path)):
        outer, own = declared_outside(function), own_names(function)
        for statement, target in handed_on(function.body):
            if isinstance(target, ast.Name) and (target.id in outer or target.id not in own):
                found.setdefault(target.id, in_words(statement))
    return found


def handed_on_by_lanes(path: str, line: int) -> dict[str, str]:
    """The same for variables and attributes in the body of the loop over lanes at this line."""
    found: dict[str, str] = {}
    for loop in loops_at(path, line):
        own = names_in([loop.target], ast.Store)
        for statement, target in handed_on(loop.body):
            name = target.id if isinstance(target, ast.Name) else target.attr
            if name not in own:
                found.setdefault(name, in_words(statement))
    return found


def handed_on(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.Name | ast.Attribute]]:
    """The statements that write what the body hands on to its next run, each with what it writes."""
    nodes = list(own_statements(body))
    for write in _writes(nodes):
        if reads_first(body, ast.unparse(write.target)) and _matters(body, nodes, write):
            yield write.statement, write.target


def reads_first(body: Iterable[ast.stmt], name: str) -> bool | None:
    """Whether a run of the body reads the name before it sets it; None if it does neither for certain.

    To write to an element of it is neither. A loop counts as if its body ran.
    """
    for statement in body:
        reads = _reads_first(statement, name)
        if reads is not None:
            return reads
    return None


def _reads_first(statement: ast.stmt, name: str) -> bool | None:
    heads, branches = _parts(statement)
    if any(_loads(head, name) for head in heads):
        return True
    if any(ast.unparse(one) == name for one in _set_by(statement)):
        return False
    found = [reads_first(branch, name) for branch in branches]
    return True if True in found else False if found and None not in found else None


def _parts(statement: ast.stmt) -> tuple[list[ast.AST], list[list[ast.stmt]]]:
    """What a statement computes itself, and the blocks of which it runs one, or, of a loop, the body."""
    if isinstance(statement, ast.If):
        return [statement.test], [statement.body, statement.orelse]
    if isinstance(statement, ast.For | ast.AsyncFor):
        return [statement.iter], [statement.body]
    if isinstance(statement, ast.While):
        return [statement.test], [statement.body]
    if isinstance(statement, ast.With | ast.AsyncWith):
        return [item.context_expr for item in statement.items], [statement.body]
    if isinstance(statement, ast.Try):
        return [], [[*statement.body, *statement.orelse, *statement.finalbody]]
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [], []
    return [statement], []


def _set_by(statement: ast.stmt) -> list[ast.expr]:
    """What it sets as a whole."""
    if isinstance(statement, ast.Assign):
        targets: Sequence[ast.expr] = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.For | ast.AsyncFor):
        targets = [statement.target]
    elif isinstance(statement, ast.With | ast.AsyncWith):
        targets = [item.optional_vars for item in statement.items if item.optional_vars is not None]
    else:
        targets = []
    return [part for target in targets for part in _unpacked(target)]


def _unpacked(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        return [part for one in target.elts for part in _unpacked(one)]
    return [target.value] if isinstance(target, ast.Starred) else [target]


def _loads(node: ast.AST, name: str) -> bool:
    """Whether it reads the name; in `seen[k] = v` the name `seen` is not read."""
    skipped = {id(bare(one)) for one in _set_by(node)} if isinstance(node, ast.stmt) else set[int]()
    return any(id(one) not in skipped for one in _places(node) if ast.unparse(one) == name)


def _places(node: ast.AST) -> list[ast.Name | ast.Attribute]:
    """The variables and attributes in it."""
    return [one for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute)]


@dataclass(frozen=True)
class Write:
    """Something is written: `target`, or an element of it, and the value that it is given."""

    statement: ast.stmt
    target: ast.Name | ast.Attribute
    value: ast.expr


def _writes(nodes: Iterable[ast.AST]) -> Iterator[Write]:
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for place, value in (pair for target in targets for pair in _paired(target, node.value)):
                owner = bare(place)
                if isinstance(owner, ast.Name | ast.Attribute):
                    yield Write(node, owner, value)


def _paired(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Of `a, b = c, d` the parts, each with its own value."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return [pair for one, its in zip(target.elts, value.elts, strict=True) for pair in _paired(one, its)]
    return [(part, value) for part in _unpacked(target)]


def _matters(body: list[ast.stmt], nodes: Sequence[ast.AST], write: Write) -> bool:
    """See Note [Handed on by a detour]."""
    tainted = _computed_from(nodes, ast.unparse(write.target))
    results = [node.value for node in nodes if isinstance(node, ast.Return)]
    if any(value is not None and _names(value) & tainted for value in (*results, write.value)):
        return True
    name = ast.unparse(write.target) if written(write.target) else None
    return name is not None and Function(ast.Module(body, [])).dependence(name, in_calls=False) is not None


def _computed_from(nodes: Sequence[ast.AST], name: str) -> set[str]:
    """The name, and what is assigned where one of these is read, or where a test decides that reads one."""
    tainted, size = {name}, 0
    while len(tainted) > size:
        size = len(tainted)
        tests = (node for node in nodes if isinstance(node, ast.If | ast.While) and _names(node.test) & tainted)
        inside = [write for node in tests for write in _writes(ast.walk(node))]
        computed = [write for write in _writes(nodes) if _names(write.value) & tainted]
        tainted |= {ast.unparse(write.target) for write in (*inside, *computed)}
    return tainted


def _names(node: ast.AST) -> set[str]:
    return {ast.unparse(one) for one in _places(node)}
