"""What lanes draw at random, by the source of a file. Pure.

What a function draws where it is not there yet, and keeps: `if self.mask is None: self.mask = rand(5)`. In a lane, each
worker draws its own. And generators of the script's own that it sets in each lane: `g.manual_seed(7)`. What these give
does not depend on other lanes.
"""

import ast
from collections.abc import Iterator, Set
from functools import lru_cache

from lockstep.script.source.computed import computed_from
from lockstep.script.source.functions import function_at
from lockstep.script.source.lane_loops import lane_loops
from lockstep.script.source.scopes import variable
from lockstep.script.source.statements import Statements, shown_by_functions
from lockstep.script.source.syntax import bare, called_name, called_on, functions_of, mentions, parsed, walked, written

_DRAWS = frozenset(
    {"rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randrange", "randperm", "permutation"}
    | {"bernoulli", "multinomial", "poisson", "normal", "uniform", "gauss", "standard_normal", "random", "dropout"}
    | {"choice", "choices", "sample", "rsample", "shuffle"}
)
_FILLS = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_")
"""The ends of the names of functions that fill a tensor."""
_SEEDS = frozenset({"manual_seed", "seed", "set_state", "setstate"})


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


@lru_cache(maxsize=1024)
def seeded_in_lanes(path: str) -> Set[str]:
    """Names and attributes of generators that the file sets in each lane: in a loop over lanes, or in a function
    without such a loop that draws from them too."""
    in_loops = {name for loop in lane_loops(parsed(path)) for name, _ in _seeded(loop)}
    functions = [one for one in functions_of(path) if not lane_loops(one)]
    return in_loops | {name for one in functions for name, uses in _seeded(one) if uses > 1}


def _seeded(part: ast.AST) -> Iterator[tuple[str, int]]:
    """The names that are set in it, and how often it mentions them."""
    names = [_last_name(node) for node in walked(part) if isinstance(node, ast.Name | ast.Attribute)]
    owners = (owner for node in walked(part) if (owner := called_on(node, _SEEDS)) is not None)
    yield from ((_last_name(owner), names.count(_last_name(owner))) for owner in owners)


def _last_name(node: ast.AST) -> str:
    return (written(node) or "").rpartition(".")[2]
