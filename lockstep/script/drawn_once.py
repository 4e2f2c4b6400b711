"""What a function draws at random where it is not there yet, and keeps: `if self.mask is None: self.mask = rand(5)`.

In a lane, each worker draws its own. Pure: by the source of a file.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import lru_cache

from lockstep.script.dependence import computed_from, function_at, mentions, own_names, parsed, walked
from lockstep.script.goes_on import bare, declared_outside, functions_of, in_words
from lockstep.script.scopes import variable

_DRAWS = frozenset(
    {"rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randrange", "randperm", "permutation"}
    | {"bernoulli", "multinomial", "poisson", "normal", "uniform", "gauss", "standard_normal", "random", "dropout"}
    | {"choice", "choices", "sample", "rsample", "shuffle"}
)
_FILLS = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_")
"""The ends of the names of functions that fill a tensor."""


@lru_cache(maxsize=1024)
def attributes_drawn_once(path: str, kind: str) -> Mapping[str, str]:
    """Attributes that methods of a class set, and never forget; each with the statement in words."""
    found: dict[str, str] = {}
    source = function_at(path, kind)
    known = {} if source is None else source.functions()
    methods = [method for name, method in known.items() if name.startswith("self.") and name != "self.__init__"]
    forgotten = {name for method in methods for name in _forgotten_by(method)}
    for target, statement in (pair for method in methods for pair in _drawn(method)):
        if isinstance(target, ast.Attribute) and target.attr not in forgotten:
            found.setdefault(target.attr, in_words(statement))
    return found


@lru_cache(maxsize=1024)
def outer_names_drawn_once(path: str) -> Mapping[str, str]:
    """The same for variables that stand outside of a function."""
    found: dict[str, str] = {}
    for function in functions_of(parsed(path)):
        outer, own = declared_outside(function), own_names(function)
        for target, statement in _drawn(function):
            if isinstance(target, ast.Name) and (target.id in outer or target.id not in own):
                found.setdefault(target.id, in_words(statement))
    return found


def _drawn(function: ast.AST) -> Iterator[tuple[ast.Name | ast.Attribute, ast.Assign]]:
    nodes = walked(function)
    draws = [node for node in nodes if isinstance(node, ast.If | ast.IfExp) and _draws(node)]
    for target, statement in _set_by(function) if draws else ():
        tainted = computed_from(nodes, variable(target) or "")
        if any(mentions(node.test, tainted) for node in draws):
            yield target, statement


def _set_by(function: ast.AST) -> Iterator[tuple[ast.Name | ast.Attribute, ast.Assign]]:
    for statement in walked(function):
        if isinstance(statement, ast.Assign):
            for target in map(bare, statement.targets):
                if isinstance(target, ast.Name | ast.Attribute) and variable(target) is not None:
                    yield target, statement


def _forgotten_by(function: ast.AST) -> set[str]:
    """The attributes that it sets to None: they are drawn again."""
    pairs = ((target, statement.value) for target, statement in _set_by(function))
    nothing = [target for target, value in pairs if isinstance(value, ast.Constant) and value.value is None]
    return {target.attr for target in nothing if isinstance(target, ast.Attribute)}


def _draws(choice: ast.If | ast.IfExp) -> bool:
    parts = [*choice.body, *choice.orelse] if isinstance(choice, ast.If) else [choice.body, choice.orelse]
    calls = (node.func for part in parts for node in ast.walk(part) if isinstance(node, ast.Call))
    names = (func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls)
    return any(name in _DRAWS or name.endswith(_FILLS) for name in names)
