"""Whether a turn of a loop, or a pass over a loader, may read what an earlier one has left in a variable. Pure.

# Note [Turns and passes]
# A variable that every turn sets before it reads it is no state: a resumed script sets it too. Where a run goes on at
# the start of a pass, the same holds for what is set before each pass. So loops that are passes themselves do not count
# then: `for` loops around those over lanes, or over something else than epochs and numbers. A loop that takes its
# batches by `next` is none. A name that only passes set is begun anew by each call of a function, but another pass in
# that function may go on from it; an attribute outlasts the call.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.script.dependence import (
    LOOPS,
    Function,
    binds,
    called,
    computed_from,
    is_range,
    is_target,
    mentions,
    walked,
)
from lockstep.script.module_hooks import filled_by
from lockstep.script.scopes import variable, variable_named

Loop = ast.For | ast.While
_FILLS = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "clear"})
"""Methods of tensors and containers that leave nothing of what they held."""


def is_carried(function: Function, name: str, *, over_passes: bool = False, in_place: bool = False) -> bool:
    """Whether a turn of a loop may read what an earlier one left in the name: no loop that sets it does so first.

    With `over_passes`, a turn of the loops around passes. With `in_place`, of what may be changed where no statement
    sets it, such as a list: a batch of a pass, where the pass only mentions it. What no loop sets by its name, but has
    changed, was changed inside: it is carried too. See Note [Turns and passes].
    """
    key = variable_named(name, function.node)
    filled = filled_by(function, key)
    uses = _Uses(key, function.functions(), filled.modules, [*filled.hooks])
    loops = [node for body in function.bodies() for node in walked(body) if isinstance(node, LOOPS)]
    if in_place:
        return any(uses.read_first(loop.body) for loop in _passes(loops))
    setting = [loop for loop in loops if any(uses.sets(part) for part in function.with_called([loop]))]
    if not setting:
        return True
    carrying = [loop for loop in setting if not is_target(loop, uses.name) and _carries(function, loop, uses)]
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
    uses = _Uses(variable_named(name, function.node), function.functions())
    loops = [node for body in function.bodies() for node in walked(body) if isinstance(node, LOOPS)]
    passes = {loop: function.with_called([loop]) for loop in _passes(loops)}
    trained = {loop for loop, parts in passes.items() if any("lanes" in called(part) for part in parts)}
    around = [loop for loop in _around_passes(loops) if trained.intersection(walked(loop))]
    is_set_around = any(uses.sets(part) for loop in around for part in loop.body if part not in loops)
    return is_set_around and not any(uses.sets(part) for parts in passes.values() for part in parts)


def _carries(function: Function, loop: Loop, uses: "_Uses") -> bool:
    """Whether a turn reads first, or what it sets under a condition alone is read elsewhere."""
    is_read = uses.read_first(loop.body)
    within = set(walked(loop))
    elsewhere = (node for node in walked(function.file or function.node) if node not in within)
    return any(_loads(node, uses.name) for node in elsewhere) if is_read is None else is_read


def _around_passes(loops: list[Loop]) -> list[Loop]:
    passes = _passes(loops)
    return [loop for loop in loops if loop not in passes and not _is_over_lanes(loop)]


def _passes(loops: list[Loop]) -> list[Loop]:
    may_be = [loop for loop in loops if _may_be_pass(loop)]
    by_lanes = [loop for loop in may_be if "lanes" in called(loop)] or may_be
    return [loop for loop in may_be if not any(one is not loop and one in walked(loop) for one in by_lanes)]


def _may_be_pass(loop: Loop) -> bool:
    if not isinstance(loop, ast.For) or _is_over_lanes(loop) or "epochs" in called(loop.iter) or is_range(loop):
        return False
    calls = [node for node in walked(loop) if isinstance(node, ast.Call)]
    if not any(isinstance(call.func, ast.Name) and call.func.id == "next" for call in calls):
        return True
    names = [name for node in ast.walk(loop.target) if (name := variable(node)) is not None]
    batches = {one for name in names for one in computed_from(walked(loop), name)}
    return any(mentions(one, batches) for call in calls if "lanes" in called(call) for one in call.args)


def _is_over_lanes(loop: Loop) -> bool:
    return isinstance(loop, ast.For) and "lanes" in called(loop.iter)


@dataclass
class _Uses:
    """Whether a variable is read before it is set: True or False, or None where it is neither."""

    name: str
    functions: Mapping[str, ast.FunctionDef]
    modules: frozenset[str] = frozenset()
    """Those that set it when they are called. See Note [Filled by hooks] in module_hooks.py."""
    _inside: list[ast.FunctionDef] = field(default_factory=list)

    def read_first(self, statements: Iterable[ast.stmt]) -> bool | None:
        """By statements one after the other, and what they call. A loop counts as if its body ran."""
        return next((is_read for one in statements if (is_read := self._by(one)) is not None), None)

    def sets(self, part: ast.AST) -> bool:
        return _sets(part, self.name) or any(self._calls_module(node) for node in walked(part))

    def _by(self, statement: ast.stmt) -> bool | None:
        match statement:
            case ast.If():
                ways = [self.read_first(way) for way in (statement.body, statement.orelse)]
                if self._in([statement.test]) or True in ways:
                    return True
                return False if ways == [False, False] else None
            case ast.For() | ast.While() | ast.With() | ast.Try():
                head = self._in([one for one in ast.iter_child_nodes(statement) if not isinstance(one, ast.stmt)])
                return self.read_first(statement.body) if head is None else head
            case ast.FunctionDef():  # runs where it is mentioned
                return None
        return self._in([statement])

    def _in(self, parts: Sequence[ast.AST]) -> bool | None:
        if any(_is_read(part, self.name) and not self._fills_before_reading(part) for part in parts):
            return True
        ways = [self._when_called(node) for part in parts for node in ast.walk(part)]
        ways += [False for part in parts if self.sets(part)]
        return True if True in ways else False if False in ways else None

    def _calls_module(self, node: ast.AST) -> bool:
        """Whether it calls such a module, or gives it to a function."""
        return isinstance(node, ast.Call) and any(variable(one) in self.modules for one in (node.func, *node.args))

    def _fills_before_reading(self, part: ast.AST) -> bool:
        """Whether a module is called in the part, to the left of where the variable is read."""
        calls = [_place(node) for node in walked(part) if self._calls_module(node)]
        reads = [_place(node) for node in walked(part) if _loads(node, self.name)]
        return bool(calls and reads) and min(calls) < min(reads)

    def _when_called(self, node: ast.AST) -> bool | None:
        called_one = self.functions.get(variable(node) or "")
        if called_one is None or called_one in self._inside:
            return None
        self._inside.append(called_one)
        is_read = self.read_first(called_one.body)
        self._inside.pop()
        return is_read


def _sets(part: ast.AST, name: str) -> bool:
    """Whether it sets the variable, or all of what it holds: `x[:] = y`, `x.copy_(y)`."""
    return binds(part, name) or any(_filled(node, name) is not None for node in walked(part))


def _filled(node: ast.AST, name: str) -> ast.expr | None:
    """The expression that is filled as a whole, where it is this variable."""
    filled: ast.expr | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        is_whole = isinstance(node.slice, ast.Slice) and node.slice.lower is node.slice.upper is None
        is_all = is_whole or (isinstance(node.slice, ast.Constant) and node.slice.value is ...)
        filled = node.value if is_all else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FILLS:
        filled = node.func.value
    return filled if filled is not None and variable(filled) == name else None


def _is_read(part: ast.AST, name: str) -> bool:
    nodes = walked(part)
    filled = {id(_filled(node, name)) for node in nodes}
    return any(_goes_on(node, name) or _loads(node, name) for node in nodes if id(node) not in filled)


def _goes_on(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.AugAssign) and any(variable(one) == name for one in ast.walk(node.target))


def _place(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _loads(node: ast.AST, name: str) -> bool:
    return variable(node) == name and not isinstance(getattr(node, "ctx", None), ast.Store)
