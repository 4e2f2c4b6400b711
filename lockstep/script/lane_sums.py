"""What a loop over `run.lanes`, or an evaluation by `run.steps`, adds up that nobody totals, as its source shows it.

# Note [Sums of one worker]
# A worker computes its own lanes. What a script adds up in a loop over them (`correct += ...`, a list of losses, a
# meter) is that worker's part, and on one worker the whole: a number that is right there, and wrong without a word on
# more. The source shows it: something that the loop's body goes on from, that is read after the loop, and that is in no
# call which totals. A function that returns it may have a caller that totals: there any such call in the file will do.
# So it does in one expression: `sum(f(x) for x in run.lanes(batch))`.

# Note [Sums that a loss spoils]
# When a worker is lost in a training step, the step is computed again: what its lanes have added to a sum of the script
# is in it twice. What the lost worker had added up is gone with it, and its copy has what its original had. Parameters
# are right, and such a sum is not, until the script begins it anew. What `run.carried` holds counts with its step.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from lockstep.script.body import names_in, own_statements
from lockstep.script.dependence import called, computed_from, parsed, walked
from lockstep.script.goes_on import (
    GROWS,
    bare,
    computed_of_all,
    function_around,
    in_words,
    loops_at,
    statement_at,
)
from lockstep.script.scopes import variable_named

_SIMPLE = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return | ast.Expr
_TOTALS = frozenset({"total", "all_reduce", "reduce", "all_gather", "gather", "gather_for_metrics"})
_RESULTS = frozenset({"avg", "mean", "sum", "count", "value", "compute", "result", "average", "global_avg", "median"})


@dataclass(frozen=True)
class LaneSum:
    """What the body of a loop over lanes adds up, and is read after the loop."""

    name: str
    words: str
    """The statement and its line."""
    is_list: bool
    is_totalled: bool


def untotalled(path: str, line: int) -> LaneSum | None:
    """What the loop over lanes at this line adds up for its worker alone."""
    return next((one for one in sums_at(path, line) if not one.is_totalled), None)


def spoilt_by_a_loss(path: str, line: int, is_committed: bool) -> LaneSum | None:
    """What of it a loss leaves wrong.

    Where a step is computed again run.total knows which entries of a list count; where it was committed all the same,
    those of the lost worker are gone.
    """
    sums = sums_at(path, line)
    return next((one for one in sums if is_committed or not (one.is_list and one.is_totalled)), None)


def sums_at(path: str, line: int) -> Iterator[LaneSum]:
    """All that the loop over lanes at this line adds up."""
    tree = parsed(path)
    if tree is None:
        return
    function = function_around(tree, line)
    for loop in loops_at(path, line):
        for statement, name in _sums(loop):
            if _is_read_outside(function, loop, statement, name):
                is_list = isinstance(statement, ast.Expr) and bool(called(statement) & GROWS)
                yield LaneSum(name, in_words(statement), is_list, _is_totalled(tree, function, name))
    around = statement_at(function, line)
    if isinstance(around, _SIMPLE):
        yield from _sum_in_one(tree, function, around)


def _sum_in_one(tree: ast.Module, function: ast.AST, statement: ast.stmt) -> Iterator[LaneSum]:
    """What one statement computes of all lanes, and is used."""
    value, used, names = computed_of_all(statement), getattr(statement, "value", None), _given_by(statement)
    is_used = bool(names) or not isinstance(statement, ast.Expr) or used is not value
    if value is None or not is_used:
        return
    is_list, words = used is value and isinstance(value, ast.ListComp), in_words(statement)
    totals = [node for node in walked(tree) if isinstance(node, ast.Call) and _totals(node)]
    if not names or any(value in ast.walk(call) for call in totals):
        is_totalled = isinstance(statement, ast.Return) or any(value in ast.walk(call) for call in totals)
        yield LaneSum(ast.unparse(value), words, is_list, bool(totals) and is_totalled)
        return
    for name in names:
        if _is_read_outside(function, statement, statement, name):
            yield LaneSum(name, words, is_list, _is_totalled(tree, function, name))


def _given_by(statement: ast.stmt) -> set[str]:
    """The variables that a statement sets or adds to."""
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return names_in(statement.targets if isinstance(statement, ast.Assign) else [statement.target], ast.Store)
    name = _changed(statement)
    return set() if name is None else {name}


def changed_by_lanes(path: str, line: int) -> dict[str, str]:
    """Variables from which the body of the loop at this line goes on, read after it or not; each with its statement."""
    return {name: in_words(statement) for loop in loops_at(path, line) for statement, name in _sums(loop)}


@lru_cache(maxsize=32)
def totalled_names(path: str) -> frozenset[str]:
    """The variables and attributes of the file that are in a call which totals."""
    tree = parsed(path)
    calls = [] if tree is None else [node for node in walked(tree) if isinstance(node, ast.Call) and _totals(node)]
    inside = [node for call in calls for node in ast.walk(call)]
    names = [node.id for node in inside if isinstance(node, ast.Name)]
    return frozenset(names + [node.attr for node in inside if isinstance(node, ast.Attribute)])


def _method(call: ast.Call) -> str | None:
    return call.func.attr if isinstance(call.func, ast.Attribute) else None


def _sums(loop: ast.For) -> Iterator[tuple[ast.stmt, str]]:
    """The statements of the body that go on from the lane before, and the name of what they change."""
    own = names_in([loop.target], ast.Store)
    for node in own_statements(loop.body):
        name = _changed(node)
        if name is not None and name not in own:
            assert isinstance(node, ast.stmt)
            yield node, name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)


def _changed(node: ast.AST) -> str | None:
    """The name of what a statement adds to."""
    if isinstance(node, ast.AugAssign):
        return _name(node.target)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        name = _name(node.targets[0])
        is_sum = isinstance(node.value, ast.BinOp | ast.Call) and name in names_in([node.value], ast.Load)
        return name if is_sum and _adds(node.value) else None
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args:
        return _name(call.func.value) if call.func.attr in {*GROWS, "update"} else None
    return None


def _adds(value: ast.expr) -> bool:
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.Add)
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("min", "max")


def _name(node: ast.expr) -> str | None:
    """A variable; of `totals["right"]` the one in front."""
    node = bare(node)
    return node.id if isinstance(node, ast.Name) else None


def _is_read_outside(function: ast.AST, loop: ast.stmt, statement: ast.stmt, name: str) -> bool:
    inside = {id(node) for node in walked(loop)}
    reads = [
        node
        for node in walked(function)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) and id(node) not in inside
    ]
    if not isinstance(statement, ast.Expr) or "update" not in called(statement):
        return bool(reads)
    results = [one for one in walked(function) if isinstance(one, ast.Attribute) and one.attr in _RESULTS]
    return any(_name(one.value) == name for one in results)  # a meter; a progress bar has none


def _totals(call: ast.Call) -> bool:
    """Not `run.total(0)`, a barrier, nor `scores.gather(1, y)`, which selects."""
    return _method(call) in _TOTALS and bool(call.args) and not isinstance(call.args[0], ast.Constant)


def _is_totalled(tree: ast.Module, function: ast.AST, name: str) -> bool:
    tainted = {one.partition("@")[0] for one in computed_from(walked(function), variable_named(name, function))}
    calls = [node for node in walked(tree) if isinstance(node, ast.Call) and _totals(node)]
    within = {id(node) for node in walked(function)}
    if any(id(call) in within and tainted & names_in([call], ast.Load) for call in calls):
        return True
    returns = [node for node in walked(function) if isinstance(node, ast.Return) and node.value is not None]
    return bool(calls) and any(tainted & names_in([node], ast.Load) for node in returns)
