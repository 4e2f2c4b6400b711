"""Statements that go on from what their own last run has left: `n += 1`, `h = f(h)`, `seen.append(x)`. Pure.

What a function sets first and then changes is its own, and does not go on from an earlier call.
"""

import ast
from collections.abc import Iterator
from functools import lru_cache

from lockstep.script.source.lane_loops import is_over_lanes, lane_loops
from lockstep.script.source.scopes import variable
from lockstep.script.source.statements import Statements, shown_by_functions
from lockstep.script.source.syntax import (
    GROWS,
    LOOPS,
    AnyFunction,
    bare,
    functions_of,
    own_statements,
    parsed,
    reads,
    walked,
)
from lockstep.script.source.uses import Uses

_Body = AnyFunction | ast.Module
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


def gone_on_from(node: ast.AST) -> ast.expr | None:
    """What the statement goes on from: of `totals["right"] += 1` it is `totals`."""
    if isinstance(node, ast.AugAssign):
        return bare(node.target)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = bare(node.targets[0])
        name = variable(target)
        return target if name is not None and any(reads(one, name) for one in ast.walk(node.value)) else None
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


def _not_set_before(function: _Body, over_passes: bool) -> Iterator[tuple[ast.stmt, ast.expr]]:
    """The statements that go on from something which the function has not set itself."""
    for node in own_statements(function.body):
        target = gone_on_from(node)
        is_own = isinstance(target, ast.Attribute) and _is_set_before(function, node, target, over_passes)
        if target is not None and not is_own:
            assert isinstance(node, ast.stmt)
            yield node, target


def _is_set_before(function: _Body, statement: ast.AST, target: ast.Attribute, over_passes: bool) -> bool:
    """Whether each run of the function, or each turn of the loop around lanes, sets it before it reads it.

    In a loop over lanes, or over batches, its body must set it; `over_passes`, what stands around those.
    """
    loops = [node for node in walked(function) if isinstance(node, LOOPS) and lane_loops(node)]
    around = [loop for loop in reversed(loops) if statement in walked(loop)]
    if over_passes:
        around = [loop for loop in around if not is_over_lanes(loop)][1:]
    name = variable(target)
    return name is not None and Uses(name).read_first((around[0] if around else function).body) is False
