"""Whether code reads what its last run has left in a variable: a turn of a loop, a pass over a loader, a lane. Pure.

# Note [Turns and passes]
# A variable that every turn of a loop sets before it reads it is no state: a resumed script sets it too.
#
#     for epoch in run.epochs(9):
#         right = 0                     # set before each pass: begins anew where a run goes on at the start of a pass
#         for batch in loader:          # a pass
#             loss = f(batch)           # set before it is read, in every turn: no state
#             right += score(batch)     # reads what the turn before has left: carried from turn to turn
#
# Where a run goes on at the start of a pass, what is set before each pass counts as set anew. So the loops that are
# passes do not count then: `for` loops around those over lanes, or over something else than epochs and numbers. A loop
# that takes its batches by `next` is none. A name that only passes set is begun anew by each call of a function, but
# another pass in that function may go on from it; an attribute outlasts the call.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.script.source.computed import computed_from
from lockstep.script.source.effects import is_range
from lockstep.script.source.functions import Function, is_target
from lockstep.script.source.lane_loops import is_over_lanes
from lockstep.script.source.module_hooks import filled_by_modules
from lockstep.script.source.scopes import variable, variable_named
from lockstep.script.source.syntax import (
    DEFINES,
    Loop,
    bare,
    called,
    called_name,
    filled_by,
    mentions,
    parts_set,
    reads,
    sets,
    variables_in,
    walked,
)


def is_carried(function: Function, name: str, *, over_passes: bool = False, in_place: bool = False) -> bool:
    """Whether a turn of a loop may read what an earlier one left in the name: no loop that sets it does so first.

    With `over_passes`, a turn of the loops around passes. With `in_place`, of what may be changed where no statement
    sets it, such as a list: a batch of a pass, where the pass only mentions it. What no loop sets by its name, but has
    changed, was changed inside: it is carried too. See Note [Turns and passes].
    """
    key = variable_named(name, function.node)
    filled = filled_by_modules(function, key)
    uses = Uses(key, function.functions(), filled.modules, [*filled.hooks])
    loops = function.loops()
    if in_place:
        return any(uses.read_first(loop.body) for loop in _passes(loops))
    setting = [loop for loop in loops if any(uses.are_set_in(part) for part in function.with_called([loop]))]
    if not setting:
        return True
    carrying = [loop for loop in setting if not is_target(loop, key) and _carries(function, loop, uses)]
    if over_passes:
        around = _around_passes(loops)
        if any(loop in around for loop in setting):
            return any(loop in around for loop in carrying)
        if not isinstance(function.node, ast.ClassDef):
            return any(loop not in walked(setting[0]) for loop in carrying)
    return bool(carrying)


def is_set_before_passes(function: Function, name: str) -> bool:
    """Whether a loop sets the name before each pass over a loader, and no pass does: in the middle of a pass it is what
    it was at its start."""
    uses = Uses(variable_named(name, function.node), function.functions())
    loops = function.loops()
    passes = {loop: function.with_called([loop]) for loop in _passes(loops)}
    trained = {loop for loop, parts in passes.items() if "lanes" in called(*parts)}
    around = [loop for loop in _around_passes(loops) if trained.intersection(walked(loop))]
    is_set_around = any(uses.are_set_in(part) for loop in around for part in loop.body if part not in loops)
    return is_set_around and not any(uses.are_set_in(part) for parts in passes.values() for part in parts)


def _carries(function: Function, loop: Loop, uses: "Uses") -> bool:
    """Whether a turn reads first, or what it sets under a condition alone is read elsewhere."""
    is_read = uses.read_first(loop.body)
    within = set(walked(loop))
    elsewhere = (node for node in function.around() if node not in within)
    return any(reads(node, uses.name) for node in elsewhere) if is_read is None else is_read


def _around_passes(loops: list[Loop]) -> list[Loop]:
    passes = _passes(loops)
    return [loop for loop in loops if loop not in passes and not is_over_lanes(loop)]


def _passes(loops: list[Loop]) -> list[Loop]:
    may_be = [loop for loop in loops if _may_be_pass(loop)]
    by_lanes = [loop for loop in may_be if "lanes" in called(loop)] or may_be
    return [loop for loop in may_be if not any(one is not loop and one in walked(loop) for one in by_lanes)]


def _may_be_pass(loop: Loop) -> bool:
    if not isinstance(loop, ast.For) or is_over_lanes(loop) or "epochs" in called(loop.iter) or is_range(loop):
        return False
    calls = [node for node in walked(loop) if isinstance(node, ast.Call)]
    if not any(isinstance(call.func, ast.Name) and called_name(call) == "next" for call in calls):
        return True
    batches = computed_from(walked(loop), variables_in(loop.target))
    return any(mentions(one, batches) for call in calls if "lanes" in called(call) for one in call.args)


@dataclass
class Uses:
    """Whether code reads a variable before it sets it: True or False, or None where it does neither for certain."""

    name: str
    functions: Mapping[str, ast.FunctionDef] = field(default_factory=dict)
    """Those whose calls count as what they do."""
    modules: frozenset[str] = frozenset()
    """Those that set it when they are called. See Note [Filled by hooks] in module_hooks.py."""
    _inside: list[ast.FunctionDef] = field(default_factory=list)
    by_element: bool = False
    """Whether `seen[key] = x` is no read of `seen`. After a restart it is one: the rest of the table is missing."""

    def read_first(self, statements: Iterable[ast.stmt]) -> bool | None:
        """By statements one after the other, and what they call. A loop counts as if its body ran."""
        return next((is_read for one in statements if (is_read := self._by(one)) is not None), None)

    def are_set_in(self, part: ast.AST) -> bool:
        """Whether the part sets the variable, or all of what it holds: `x[:] = y`, `x.copy_(y)`."""
        return sets(part, self.name) or any(self._fills(node) or self._calls_module(node) for node in walked(part))

    def _by(self, statement: ast.stmt) -> bool | None:
        match statement:
            case ast.If():
                ways = [self.read_first(way) for way in (statement.body, statement.orelse)]
                if self._in([statement.test]) or True in ways:
                    return True
                return False if ways == [False, False] else None
            case ast.For() | ast.AsyncFor() | ast.While() | ast.With() | ast.AsyncWith():
                head = self._in([one for one in ast.iter_child_nodes(statement) if not isinstance(one, ast.stmt)])
                return self.read_first(statement.body) if head is None else head
            case ast.Try():
                return self.read_first([*statement.body, *statement.orelse, *statement.finalbody])
            case _ if isinstance(statement, DEFINES):  # runs where it is mentioned
                return None
        return self._in([statement])

    def _in(self, parts: Sequence[ast.AST]) -> bool | None:
        if any(self._is_read_in(part) and not self._is_filled_before_read(part) for part in parts):
            return True
        ways = [self._when_called(node) for part in parts for node in ast.walk(part)]
        ways += [False for part in parts if self.are_set_in(part)]
        return True if True in ways else False if False in ways else None

    def _fills(self, node: ast.AST) -> bool:
        filled = filled_by(node)
        return filled is not None and variable(filled) == self.name

    def _is_read_in(self, part: ast.AST) -> bool:
        nodes = walked(part)
        skipped = {id(filled_by(node)) for node in nodes}
        skipped |= {id(bare(one)) for one in parts_set(part) if self.by_element and not isinstance(part, ast.AugAssign)}
        return any(self._goes_on(node) or reads(node, self.name) for node in nodes if id(node) not in skipped)

    def _goes_on(self, node: ast.AST) -> bool:
        return isinstance(node, ast.AugAssign) and any(variable(one) == self.name for one in ast.walk(node.target))

    def _calls_module(self, node: ast.AST) -> bool:
        """Whether it calls such a module, or gives it to a function."""
        return isinstance(node, ast.Call) and any(variable(one) in self.modules for one in (node.func, *node.args))

    def _is_filled_before_read(self, part: ast.AST) -> bool:
        """Whether a module is called in the part, to the left of where the variable is read."""
        calls = [_place(node) for node in walked(part) if self._calls_module(node)]
        places = [_place(node) for node in walked(part) if reads(node, self.name)]
        return bool(calls and places) and min(calls) < min(places)

    def _when_called(self, node: ast.AST) -> bool | None:
        called_one = self.functions.get(variable(node) or "")
        if called_one is None or called_one in self._inside:
            return None
        self._inside.append(called_one)
        is_read = self.read_first(called_one.body)
        self._inside.pop()
        return is_read


def _place(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
