"""Loops over lanes: `for x, y in run.lanes(batch)`, `for x, y in run.steps(loader)`, and what hands lanes on. Pure."""

import ast
from functools import lru_cache

from lockstep.script.source.syntax import (
    called,
    called_name,
    function_around,
    names_read,
    names_set,
    nodes_of,
    own_statements,
    parsed,
    statement_at,
    walked,
)

_LANES = frozenset({"lanes", "steps"})
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp
_RUN_THROUGH = frozenset({"sum", "max", "min", "list", "tuple", "set", "dict", "sorted", "all", "any", "fmean"})
_WRAPPERS = frozenset({"enumerate", "zip", "map", "filter", "iter", "islice", "tqdm", "chain"})


def is_over_lanes(loop: ast.For | ast.While) -> bool:
    """Whether it goes over the lanes of one batch; a loop over `run.steps` is a pass too."""
    return isinstance(loop, ast.For) and "lanes" in called(loop.iter)


def lane_loops(function: ast.AST | None) -> list[ast.For]:
    """The loops over `run.lanes` and `run.steps` in it."""
    nodes = () if function is None else walked(function)
    return [node for node in nodes if isinstance(node, ast.For) and _LANES & called(node.iter)]


def loops_headed(path: str, line: int) -> list[ast.For]:
    """The `for` statements whose head is at this line."""
    loops = [node for node in nodes_of(path) if isinstance(node, ast.For)]
    return [loop for loop in loops if loop.lineno <= line <= (loop.iter.end_lineno or loop.lineno)]


def loops_at(path: str, line: int) -> list[ast.For]:
    """Those over lanes that are asked for at this line of a file: its head is there, or it runs over what is set there
    (`lanes = run.lanes(batch)`).

    Of a line that calls what hands lanes on (`hands_on`), the loop over that.
    """
    tree = parsed(path)
    if tree is None:
        return []
    nodes = walked(function_around(tree, line))
    here = [node for node in nodes if isinstance(node, ast.Assign) and node.lineno <= line <= (node.end_lineno or 0)]
    names = names_set(*(target for one in here if _LANES & called(one.value) for target in one.targets))
    later = [node for node in nodes if isinstance(node, ast.For) and node.lineno > line]
    return loops_headed(path, line) or [loop for loop in later if names & names_read(loop.iter)]


@lru_cache(maxsize=1024)
def hands_on(path: str, line: int) -> bool:
    """Whether the function around this line hands the lanes that it asks for there on, by return or yield.

    Asked at every loop over lanes.
    """
    tree = parsed(path)
    statement = None if tree is None else statement_at(function_around(tree, line), line)
    if isinstance(statement, ast.Return) and statement.value is not None:
        return not computed_of_all(statement.value)
    is_yield = (isinstance(one, ast.Yield | ast.YieldFrom) for one in own_statements([statement] if statement else []))
    return any(is_yield)


def computed_of_all(node: ast.AST) -> ast.expr | None:
    """What an expression computes of all lanes, if anything: `[f(x) for x in run.lanes(batch)]`, or a `sum` of it."""
    over = [one for one in ast.walk(node) if isinstance(one, ast.Call | _COMPREHENSIONS) and _LANES & called(one)]
    return next((one for one in over if not isinstance(one, ast.Call) or _runs_through(one)), None)


def _runs_through(call: ast.Call) -> bool:
    """Whether it goes through the lanes that it is given: those that are known, and all that take what is computed."""
    is_given = any(isinstance(one, ast.GeneratorExp) and _LANES & called(one) for one in call.args)
    return called_name(call) in _RUN_THROUGH or (is_given and called_name(call) not in _WRAPPERS)
