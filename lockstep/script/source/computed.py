"""What is computed from a variable: `weight = 0.9**step`, then `loss = weight * loss`, come from `step`. Pure."""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lockstep.script.source.syntax import ASSIGNS, TESTED, changed_by, mentions, walked


def computed_from(
    nodes: Sequence[ast.AST], names: Iterable[str], functions: Mapping[str, ast.FunctionDef] | None = None
) -> set[str]:
    """The variables, all that are given something in which one of them is mentioned, or where a test that mentions one
    of them decides, and those of the `functions` whose results do so."""
    tainted = set(names)
    while True:
        new = {name for node in nodes for name in _given(node, tainted)}
        new |= {name for name, function in (functions or {}).items() if gives(function, tainted)}
        if new <= tainted:
            return tainted
        tainted |= new


def gives(function: ast.FunctionDef, tainted: set[str]) -> bool:
    """Whether the result of a function depends on one of these."""
    results = [node for node in walked(function) if isinstance(node, ast.Return | ast.Yield) and node.value is not None]
    tests = [node for node in walked(function) if isinstance(node, TESTED) and mentions(node.test, tainted)]
    decided = {id(node) for test in tests for node in ast.walk(test)}
    return any(id(node) in decided or mentions(node, tainted) for node in results)


def _given(node: ast.AST, tainted: set[str]) -> Iterator[str]:
    if isinstance(node, ASSIGNS):
        if node.value is not None and mentions(node.value, tainted):
            yield from changed_by(node)
    elif isinstance(node, ast.For | ast.AsyncFor):
        if mentions(node.iter, tainted):
            yield from changed_by(node)
    elif isinstance(node, TESTED) and mentions(node.test, tainted):
        yield from (name for inner in ast.walk(node) if isinstance(inner, ASSIGNS) for name in changed_by(inner))
