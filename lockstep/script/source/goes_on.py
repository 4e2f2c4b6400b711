"""Statements that go on from what their own last run has left: `n += 1`, `h = f(h)`, `seen.append(x)`. Pure.

What a function sets first and then changes is its own, and does not go on from an earlier call.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import lru_cache

from lockstep.script.source.lane_loops import is_over_lanes, lane_loops
from lockstep.script.source.statements import Statements, shown_by_functions
from lockstep.script.source.syntax import GROWS, LOOPS, bare, functions_of, own_statements, parsed, walked

_NO_STEP = frozenset({"copy_", "zero_", "fill_", "detach_", "requires_grad_", "resize_", "set_"})
"""Methods of tensors whose result does not go on from the tensor's value."""


@lru_cache(maxsize=1024)
def gone_on_in(path: str, over_passes: bool = False) -> Statements:
    """What the code of a file goes on from; of what stands outside of functions, attributes alone.

    With `over_passes`, those that no pass over a loader begins anew.
    """
    tree = parsed(path)
    shown = shown_by_functions(functions_of(path), lambda function: _not_set_before(function, over_passes))
    if tree is not None:
        shown.add(_not_set_before(tree, over_passes), lambda name: False)
    return shown


def gone_on_by(statements: Iterable[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.expr]]:
    """Those of the statements that go on from something, each with that."""
    for node in own_statements(statements):
        target = gone_on_from(node)
        if target is not None:
            assert isinstance(node, ast.stmt)
            yield node, target


def gone_on_from(node: ast.AST) -> ast.expr | None:
    """What the statement goes on from: of `totals["right"] += 1` it is `totals`."""
    if isinstance(node, ast.AugAssign):
        return bare(node.target)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = bare(node.targets[0])
        return target if _is_read(target, node.value) else None
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _changed_in_place(node.value)
    return None


def _changed_in_place(call: ast.Call) -> ast.expr | None:
    """What a call of methods like `append` and `mul_` changes: of `self.mean.mul_(0.9).add_(x)` it is `self.mean`."""
    methods: list[str] = []
    owner: ast.expr = call
    while isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute):
        methods.append(owner.func.attr)
        owner = owner.func.value
    steps = [one for one in methods if one.endswith("_") and not one.endswith("__") and one not in _NO_STEP]
    is_changed = bool(steps) or (bool(call.args) and methods[:1] != [] and methods[0] in GROWS)
    return bare(owner) if is_changed and isinstance(bare(owner), ast.Name | ast.Attribute) else None


def _not_set_before(
    function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module, over_passes: bool
) -> Iterator[tuple[ast.stmt, ast.expr]]:
    """In a loop over lanes, or over batches, it would have to be in its body; `over_passes`, around those."""
    for statement, target in gone_on_by(function.body):
        if not (isinstance(target, ast.Attribute) and _is_set_before(function, statement, target, over_passes)):
            yield statement, target


def _is_set_before(function: ast.AST, statement: ast.stmt, target: ast.Attribute, over_passes: bool) -> bool:
    loops = [node for node in walked(function) if isinstance(node, LOOPS) and lane_loops(node)]
    around = [loop for loop in reversed(loops) if statement in walked(loop)]
    if over_passes:
        around = [loop for loop in around if not is_over_lanes(loop)][1:]
    return any(
        isinstance(node, ast.Assign)
        and node.lineno < statement.lineno
        and any(_is_same(one, target) for one in node.targets)
        and not _is_read(target, node.value)
        for node in walked(around[0] if around else function)
    )


def _is_read(target: ast.expr, value: ast.expr) -> bool:
    """Whether the value reads the variable or attribute."""
    return any(_is_same(node, target) and isinstance(node.ctx, ast.Load) for node in ast.walk(value))  # type: ignore


def _is_same(node: ast.AST, target: ast.expr) -> bool:
    is_place = isinstance(target, ast.Name | ast.Attribute) and isinstance(node, type(target))
    return is_place and ast.unparse(node) == ast.unparse(target)
