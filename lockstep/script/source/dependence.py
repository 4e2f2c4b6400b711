"""Whether the training depends on a variable of the script, by the source. Pure: source text in.

# Note [What depends on a counter]
# Many scripts count batches only to print now and then:
#
#     for i, batch in enumerate(loader):
#         ...
#         if i % 100 == 0: print(loss)
#
# So before a script is refused because of a counter, its source must show that the training depends on it. It does
# where a test that mentions the counter, or a name that was computed from it, guards a call that trains
# (`if i % 2: optimizer.step()`), guards what sets a rate, or ends the loop. And it does where the number goes into a
# loss, a rate, a scheduler, a gradient or parameter that is changed in place, a `load_state_dict`, the choice of an
# optimizer, or a loop's range.
"""

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from lockstep.script.source.computed import computed_from
from lockstep.script.source.effects import (
    changes_parameters,
    given_to_loaders,
    is_for_steps,
    is_range,
    parameters_set_by,
    rates_set_by,
    takes_rates,
    training_calls,
    trains,
    trains_by_owner,
)
from lockstep.script.source.functions import Function, is_target
from lockstep.script.source.scopes import variable, variable_named
from lockstep.script.source.syntax import ASSIGNS, TESTED, Loop, given_to, mentions, walked


@dataclass(frozen=True)
class Dependence:
    """A line of the script at which the training depends on a variable, and how, in words."""

    line: int
    how: str


def dependence(
    function: Function,
    name: str,
    *,
    again: bool = False,
    in_calls: bool = True,
    unchanged: Collection[str] = (),
    _callers: frozenset[ast.AST] = frozenset(),
) -> Dependence | None:
    """Where the training depends on `name` first, if it does; with `again`, only in what is done more than once.

    With `in_calls`, being passed to a function beside an optimizer counts. Of an object, attributes that are
    `unchanged` do not count where the source names them.
    """
    key = variable_named(name, function.node)
    nodes = [node for part in (function.repeated() if again else function.bodies()) for node in walked(part)]
    tainted = computed_from(nodes, [key, *(f"!{key}.{one}" for one in unchanged)], function.functions())
    used = next(_read_in_steps(function, tainted), None)
    if used is not None:
        return Dependence(used.lineno, f"is read in {used.name}")
    places = (_decides(function, node, tainted) or _goes_into(node, tainted, key, in_calls) for node in nodes)
    found = min(filter(None, places), key=lambda one: one.line, default=None)
    callers = _callers | {function.node}
    inside = (
        dependence(Function(callee, function.file), its, in_calls=in_calls, unchanged=unchanged, _callers=callers)
        for callee, its in ([] if found else _given_to_callees(function, nodes, tainted))
        if callee not in callers
    )
    return found or next(filter(None, inside), None)


def _given_to_callees(
    function: Function, nodes: Sequence[ast.AST], tainted: set[str]
) -> Iterator[tuple[ast.FunctionDef, str]]:
    """The file's own functions that are given one of these, each with the name of the argument."""
    for call in nodes:
        callee = function.functions().get(variable(call.func) or "") if isinstance(call, ast.Call) else None
        if callee is not None:
            assert isinstance(call, ast.Call)
            is_method = (variable(call.func) or "").startswith("self.")
            names = [one.arg for one in (*callee.args.posonlyargs, *callee.args.args)][is_method:]
            passed = [*zip(names, call.args, strict=False), *((one.arg, one.value) for one in call.keywords)]
            yield from ((callee, name) for name, value in passed if name is not None and mentions(value, tainted))


def _read_in_steps(function: Function, tainted: set[str]) -> "Iterator[ast.FunctionDef | ast.ClassDef]":
    """Modules, data sets and functions for loaders that read one of these."""
    given = {name for node in function.around() for name in given_to_loaders(node)}
    for one in function.around():
        if isinstance(one, ast.ClassDef) and one not in function.bodies() and is_for_steps(one):
            methods = [method for method in one.body if isinstance(method, ast.FunctionDef)]
            if any(mentions(method, tainted) for method in methods if method.name != "__init__"):
                yield one
        elif isinstance(one, ast.FunctionDef) and one.name in given and mentions(one, tainted):
            yield one


def _decides(function: Function, node: ast.AST, tainted: set[str]) -> Dependence | None:
    if not isinstance(node, TESTED) or not mentions(node.test, tainted):
        return None
    loops = [loop for loop in function.loops() if node in walked(loop)]
    call = next(training_calls(node), None) or _changing_call(function, node) or _skipped_call(function, node, loops)
    if call is not None:
        return Dependence(node.lineno, f"decides whether {ast.unparse(call.func)}() is called")
    rate = next((target for one in ast.walk(node) for target in rates_set_by(one)), None)
    if rate is not None:
        return Dependence(node.lineno, f"decides whether {ast.unparse(rate)} is set")
    if isinstance(node, ast.While) or (_has(node, ast.Break, ast.Return) and loops):
        return Dependence(node.lineno, "decides when the loop ends")
    return None


def _changing_call(function: Function, node: ast.AST) -> ast.Call | None:
    """A call of one of the file's own functions that changes parameters, or calls one that does."""
    calls = (call for call in ast.walk(node) if isinstance(call, ast.Call))
    named = ((call, function.functions().get(variable(call.func) or "")) for call in calls)
    return next((call for call, callee in named if callee is not None and _changes(function, callee)), None)


def _changes(function: Function, callee: ast.FunctionDef) -> bool:
    return any(changes_parameters(node) for part in function.with_called([callee]) for node in walked(part))


def _skipped_call(function: Function, node: ast.If | ast.While | ast.IfExp, loops: Sequence[Loop]) -> ast.Call | None:
    """A call that trains, after a `continue` in the same loop, or a `return` in the same function."""
    around: list[ast.AST] = [*loops] if _has(node, ast.Continue) else []
    if _has(node, ast.Return):
        around = [one for one in function.functions().values() if node in walked(one)]
    behind = (call for call in training_calls(around[-1]) if call.lineno > (node.end_lineno or 0)) if around else None
    return next(behind, None) if behind is not None else None


def _goes_into(node: ast.AST, tainted: set[str], name: str, in_calls: bool) -> Dependence | None:
    if is_target(node, name) and is_range(node):
        return Dependence(node.lineno, "decides how long the loop goes on")  # type: ignore[attr-defined]
    if isinstance(node, ast.Call):
        takes = takes_rates(node) if in_calls else trains(node)
        given = takes and any(mentions(part, tainted) for part in given_to(node))
        if given or (trains_by_owner(node) and mentions(node.func, tainted)):
            return Dependence(node.lineno, f"goes into {ast.unparse(node)}")
    set_by = [*rates_set_by(node), *parameters_set_by(node)]
    if isinstance(node, ASSIGNS) and set_by and node.value is not None and mentions(node.value, tainted):
        return Dependence(node.lineno, f"goes into {ast.unparse(set_by[0])}")
    return None


def _has(node: ast.AST, *kinds: type[ast.AST]) -> bool:
    return any(isinstance(inner, kinds) for inner in ast.walk(node))
