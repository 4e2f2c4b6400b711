"""What a function draws at random where it is not there yet, and keeps: `if self.mask is None: self.mask = rand(5)`.

In a lane, each worker draws its own. Pure: by the source of a file.
"""

import ast
from collections.abc import Iterator
from functools import lru_cache

from lockstep.script.source.computed import computed_from
from lockstep.script.source.functions import function_at
from lockstep.script.source.scopes import variable
from lockstep.script.source.statements import Statements, shown_by_functions
from lockstep.script.source.syntax import bare, called_name, functions_of, mentions, walked

_DRAWS = frozenset(
    {"rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randrange", "randperm", "permutation"}
    | {"bernoulli", "multinomial", "poisson", "normal", "uniform", "gauss", "standard_normal", "random", "dropout"}
    | {"choice", "choices", "sample", "rsample", "shuffle"}
)
_FILLS = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_")
"""The ends of the names of functions that fill a tensor."""


@lru_cache(maxsize=1024)
def drawn_once_in(path: str, kind: str) -> Statements:
    """What functions of a file draw once, and none of them forgets (`self.mask = None`); with a `kind`, the methods of
    this class."""
    functions = functions_of(path)
    if kind:
        source = function_at(path, kind)
        known = {} if source is None else source.functions()
        functions = [one for name, one in known.items() if name.startswith("self.") and one in functions]
    forgotten = {name for function in functions for name in _forgotten_by(function)}

    def find(function: ast.AST) -> Iterator[tuple[ast.stmt, ast.expr]]:
        drawn = _drawn(function)
        return ((one, its) for one, its in drawn if not (isinstance(its, ast.Attribute) and its.attr in forgotten))

    return shown_by_functions(functions, find)


def _drawn(function: ast.AST) -> Iterator[tuple[ast.Assign, ast.expr]]:
    nodes = walked(function)
    draws = [node for node in nodes if isinstance(node, ast.If | ast.IfExp) and _draws(node)]
    for statement, target in _set_by(function) if draws else ():
        tainted = computed_from(nodes, [variable(target) or ""])
        if any(mentions(node.test, tainted) for node in draws):
            yield statement, target


def _set_by(function: ast.AST) -> Iterator[tuple[ast.Assign, ast.expr]]:
    for statement in walked(function):
        if isinstance(statement, ast.Assign):
            yield from ((statement, one) for one in map(bare, statement.targets) if variable(one) is not None)


def _forgotten_by(function: ast.AST) -> Iterator[str]:
    """The attributes that it sets to None: they are drawn again."""
    for statement, target in _set_by(function):
        is_nothing = isinstance(statement.value, ast.Constant) and statement.value.value is None
        if is_nothing and isinstance(target, ast.Attribute):
            yield target.attr


def _draws(choice: ast.If | ast.IfExp) -> bool:
    parts = [*choice.body, *choice.orelse] if isinstance(choice, ast.If) else [choice.body, choice.orelse]
    names = [called_name(node) for part in parts for node in ast.walk(part) if isinstance(node, ast.Call)]
    return any(name in _DRAWS or name.endswith(_FILLS) for name in names)
