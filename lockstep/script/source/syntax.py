"""The vocabulary for reading a script's source: a parsed file, the functions and statements in it, and what they set,
read and change in place. Pure."""

import ast
import linecache
from collections.abc import Iterable, Iterator
from functools import lru_cache

from lockstep.script.source.scopes import mark, place_of, variable

LOOPS = (ast.For, ast.While)
Loop = ast.For | ast.While
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef
DEFINES = (*FUNCTIONS, ast.ClassDef)
ASSIGNS = (ast.Assign, ast.AnnAssign, ast.AugAssign)
Assign = ast.Assign | ast.AnnAssign | ast.AugAssign
TESTED = (ast.If, ast.While, ast.IfExp)
_SCOPES = (*DEFINES, ast.Lambda)
GROWS = frozenset({"append", "extend", "add"})
"""Methods that add to a list or a set."""
FILLS = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "clear"})
"""Methods of tensors and containers that leave nothing of what they held."""


# -- files and what stands in them ------------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def parsed(path: str) -> ast.Module | None:
    """The source of a file, whose names know whose they are; None where it cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)), path)
    except (SyntaxError, ValueError, RecursionError):
        return None
    mark(tree)
    return tree


@lru_cache(maxsize=128)
def walked(node: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a file, a function or a loop, which are looked through many times: `ast.walk` takes 50 times as
    long as a look at each."""
    return tuple(ast.walk(node))


def nodes_of(path: str) -> tuple[ast.AST, ...]:
    """All nodes of a file; none where it cannot be read."""
    tree = parsed(path)
    return () if tree is None else walked(tree)


def own_statements(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All that stands in these, except in functions and classes that they define."""
    for node in nodes:
        if not isinstance(node, _SCOPES):
            yield node
            yield from own_statements(ast.iter_child_nodes(node))


def functions_of(path: str) -> list[AnyFunction]:
    """The functions and methods of a file, but for those that make an object."""
    return [node for node in nodes_of(path) if isinstance(node, FUNCTIONS) and node.name != "__init__"]


def function_around(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function around a line; the module where there is none."""
    around = [node for node in walked(tree) if isinstance(node, FUNCTIONS) and _has_line(node, line)]
    return max(around, key=lambda node: node.lineno) if around else tree


def statement_at(function: ast.AST, line: int) -> ast.stmt | None:
    """The innermost statement that has the line; of a compound one, in its head."""
    found = None
    for node in walked(function):
        if isinstance(node, ast.stmt) and node.lineno <= line:
            body = getattr(node, "body", None)
            if line <= (max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno):
                found = node
    return found


def _has_line(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def in_words(statement: ast.stmt) -> str:
    return f"`{ast.unparse(statement):.100}` (line {statement.lineno})"


# -- names and variables ----------------------------------------------------------------------------------------------


def names_set(*nodes: ast.AST) -> set[str]:
    """The names that are set in these."""
    return {one.id for one in _names_in(nodes) if isinstance(one.ctx, ast.Store)}


def names_read(*nodes: ast.AST) -> set[str]:
    return {one.id for one in _names_in(nodes) if isinstance(one.ctx, ast.Load)}


def _names_in(nodes: Iterable[ast.AST]) -> Iterator[ast.Name]:
    return (one for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name))


def arguments_of(function: ast.AST) -> set[str]:
    """The names of its arguments, and of those of functions inside of it."""
    return {node.arg for node in walked(function) if isinstance(node, ast.arg)}


def is_outer(name: str, function: AnyFunction) -> bool:
    """Whether the variable stands outside of the function: a global one, or one of a function around it."""
    declared = (one for one in own_statements(function.body) if isinstance(one, ast.Global | ast.Nonlocal))
    return any(name in one.names for one in declared) or name not in arguments_of(function) | names_set(function)


def variables_in(node: ast.AST) -> set[str]:
    """The variables that are read or set in it (scopes.py)."""
    return {name for one in ast.walk(node) if (name := variable(one)) is not None}


def given_variables(function: AnyFunction) -> set[str]:
    """The arguments of a function as variables, without `self` and `cls`."""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return {f"{one.arg}{place_of(function)}" for one in every if one.arg not in ("self", "cls")}


def mentions(node: ast.AST, names: set[str]) -> bool:
    """Whether one of these variables is read or set in it, by more than an attribute that has not changed: of
    `!work.loader`, `work.loader` is no mention of `work`."""
    inside = list(ast.walk(node))
    passed = {id(one.value) for one in inside if isinstance(one, ast.Attribute) and f"!{variable(one)}" in names}
    return any(variable(inner) in names and id(inner) not in passed for inner in inside)


def written(node: ast.AST) -> str | None:
    """A variable as counters are named: an attribute of `self` by its name alone, others as `args.beta`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr if node.value.id == "self" else f"{node.value.id}.{node.attr}"
    return None


# -- what a statement sets and changes --------------------------------------------------------------------------------


def targets_of(statement: ast.AST) -> list[ast.expr]:
    """What it sets, as it is written: of `a, b[0] = c` that is `a, b[0]`."""
    if isinstance(statement, ast.Assign):
        return statement.targets
    if isinstance(statement, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        return [statement.target]
    items = statement.items if isinstance(statement, ast.With | ast.AsyncWith) else []
    return [item.optional_vars for item in items if item.optional_vars is not None]


def parts_set(statement: ast.AST) -> list[ast.expr]:
    """What it sets, one by one: of `a, b[0] = c` that is `a` and `b[0]`."""
    return [part for target in targets_of(statement) for part in unpacked(target)]


def unpacked(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        return [part for one in target.elts for part in unpacked(one)]
    return [target.value] if isinstance(target, ast.Starred) else [target]


def bare(node: ast.expr) -> ast.expr:
    """Of `totals["right"]` what stands in front."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def changed_by(statement: ast.AST) -> set[str]:
    """The variables that change where it sets something: of `a.b[i]` that is `a` and `a.b`, of `self.b[i]` `self.b`."""
    names = set[str]()
    for place in parts_set(statement):
        part = place
        while isinstance(part, ast.Subscript | ast.Attribute | ast.Starred):
            names.add(variable(part) or "")
            part = part.value
        names.add("" if isinstance(part, ast.Name) and part.id == "self" else variable(part) or "")
    return names - {""}


def sets(node: ast.AST, name: str) -> bool:
    """Whether a statement in it sets the variable itself: of `table["best"] = 1` that is not `table`."""
    return any(variable(one) == name and isinstance(getattr(one, "ctx", None), ast.Store) for one in walked(node))


def filled_by(node: ast.AST) -> ast.expr | None:
    """What it fills as a whole, without setting the variable: `x[:] = y`, `x.copy_(y)`, `x.clear()`."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        is_whole = isinstance(node.slice, ast.Slice) and node.slice.lower is node.slice.upper is None
        return node.value if is_whole or (isinstance(node.slice, ast.Constant) and node.slice.value is ...) else None
    return called_on(node, FILLS)


def reads(node: ast.AST, name: str) -> bool:
    return variable(node) == name and not isinstance(getattr(node, "ctx", None), ast.Store)


# -- calls ------------------------------------------------------------------------------------------------------------


def called(*nodes: ast.AST) -> set[str]:
    """The names of the methods that are called in these."""
    calls = [one.func for node in nodes for one in ast.walk(node) if isinstance(one, ast.Call)]
    return {method.attr for method in calls if isinstance(method, ast.Attribute)}


def called_name(call: ast.Call) -> str:
    """The name of the function or method that is called, without what stands in front."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def called_on(node: ast.AST, methods: frozenset[str]) -> ast.expr | None:
    """What one of these methods is called on, where the node is such a call: of `seen.add(x)` it is `seen`."""
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods
    return node.func.value if is_method else None  # type: ignore[attr-defined]


def given_to(call: ast.Call) -> list[ast.expr]:
    """The arguments of a call."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]
