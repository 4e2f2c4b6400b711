"""What a loop over `run.lanes`, or an evaluation by `run.steps`, adds up that nobody totals, as its source shows it.

# Note [Sums of one worker]
# A worker computes its own lanes. What a script adds up in a loop over them is that worker's part:
#
#     for x, y in run.lanes(batch):
#         correct += right(model(x), y)
#     print(correct / len(data))
#
# On one worker the number is right, and on more it is wrong without a word. The source shows it: the loop's body goes
# on from something that is read after the loop, and that is in no call which totals, as `run.total(correct)`. A
# function that returns it may have a caller that totals: there any such call in the file will do. The same holds for
# one expression: `sum(f(x) for x in run.lanes(batch))`.

# Note [Sums that a loss spoils]
# When a worker is lost in a training step, the step is computed again: what its lanes have added to a sum of the script
# is in it twice. What the lost worker had added up is gone with it, and its copy has what its original had. Parameters
# are right, and such a sum is not, until the script begins it anew. What `run.carried` holds counts with its step.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from lockstep.script.source.computed import computed_from
from lockstep.script.source.lane_loops import computed_of_all, loops_at
from lockstep.script.source.scopes import variable_named
from lockstep.script.source.statements import Statements, shown_by_lanes
from lockstep.script.source.syntax import (
    GROWS,
    bare,
    called,
    called_on,
    function_around,
    in_words,
    mentions,
    names_read,
    names_set,
    nodes_of,
    own_statements,
    parsed,
    statement_at,
    targets_of,
    walked,
)

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
        for statement, place in _sums(loop):
            if _is_read_outside(function, loop, statement, place.id):
                is_list = isinstance(statement, ast.Expr) and bool(called(statement) & GROWS)
                yield LaneSum(place.id, in_words(statement), is_list, _is_totalled(path, function, place.id))
    around = statement_at(function, line)
    if isinstance(around, _SIMPLE):
        yield from _sum_in_one(path, function, around)


def _sum_in_one(path: str, function: ast.AST, statement: ast.stmt) -> Iterator[LaneSum]:
    """What one statement computes of all lanes, and is used."""
    value, used, names = computed_of_all(statement), getattr(statement, "value", None), _given_by(statement)
    if value is None or not (names or not isinstance(statement, ast.Expr) or used is not value):
        return
    is_list, words = used is value and isinstance(value, ast.ListComp), in_words(statement)
    totals = _totals_in(path)
    is_in_total = any(value in ast.walk(call) for call in totals)
    if is_in_total or not names:
        is_totalled = bool(totals) and (is_in_total or isinstance(statement, ast.Return))
        yield LaneSum(ast.unparse(value), words, is_list, is_totalled)
        return
    for name in names:
        if _is_read_outside(function, statement, statement, name):
            yield LaneSum(name, words, is_list, _is_totalled(path, function, name))


def _given_by(statement: ast.stmt) -> set[str]:
    """The variables that a statement sets or adds to."""
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return names_set(*targets_of(statement))
    place = _changed(statement)
    return set() if place is None else {place.id}


def changed_by_lanes(path: str, line: int) -> Statements:
    """Variables from which the body of the loop at this line goes on, read after it or not."""
    return shown_by_lanes(path, line, _sums)


@lru_cache(maxsize=32)
def totalled_names(path: str) -> frozenset[str]:
    """The variables and attributes of the file that are in a call which totals."""
    inside = [node for call in _totals_in(path) for node in ast.walk(call)]
    names = [node.id for node in inside if isinstance(node, ast.Name)]
    return frozenset(names + [node.attr for node in inside if isinstance(node, ast.Attribute)])


def _sums(loop: ast.For) -> Iterator[tuple[ast.stmt, ast.Name]]:
    """The statements of the body that go on from the lane before, and what they change."""
    own = names_set(loop.target)
    for node in own_statements(loop.body):
        place = _changed(node)
        if place is not None and place.id not in own:
            assert isinstance(node, ast.stmt)
            yield node, place
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)


def _changed(node: ast.AST) -> ast.Name | None:
    """The variable to which a statement adds; of `totals["right"] += 1` it is `totals`."""
    place: ast.expr | None = None
    if isinstance(node, ast.AugAssign):
        place = bare(node.target)
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        place = bare(node.targets[0]) if _adds(node.value) else None
        place = place if isinstance(place, ast.Name) and place.id in names_read(node.value) else None
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
        owner = called_on(node.value, GROWS | {"update"})
        place = None if owner is None else bare(owner)
    return place if isinstance(place, ast.Name) else None


def _adds(value: ast.expr) -> bool:
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.Add)
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("min", "max")


def _is_read_outside(function: ast.AST, loop: ast.stmt, statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, ast.Expr) and "update" in called(statement):  # a meter; a progress bar has no result
        results = [one for one in walked(function) if isinstance(one, ast.Attribute) and one.attr in _RESULTS]
        owners = (bare(one.value) for one in results)
        return any(isinstance(owner, ast.Name) and owner.id == name for owner in owners)
    inside = {id(node) for node in walked(loop)}
    outside = (node for node in walked(function) if isinstance(node, ast.Name) and id(node) not in inside)
    return any(node.id == name and isinstance(node.ctx, ast.Load) for node in outside)


def _totals_in(path: str) -> list[ast.Call]:
    """The calls of a file that total. Not `run.total(0)`, a barrier, nor `scores.gather(1, y)`, which selects."""
    calls = [node for node in nodes_of(path) if isinstance(node, ast.Call) and called_on(node, _TOTALS) is not None]
    return [call for call in calls if call.args and not isinstance(call.args[0], ast.Constant)]


def _is_totalled(path: str, function: ast.AST, name: str) -> bool:
    """Whether the function totals it, or gives it to a caller that may."""
    tainted = computed_from(walked(function), [variable_named(name, function)])
    calls = _totals_in(path)
    if any(call in walked(function) and mentions(call, tainted) for call in calls):
        return True
    results = (node for node in walked(function) if isinstance(node, ast.Return) and node.value is not None)
    return bool(calls) and any(mentions(node, tainted) for node in results)
