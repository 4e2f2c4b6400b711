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

from lockstep.script.source.computed import computed_from
from lockstep.script.source.effects import is_range
from lockstep.script.source.functions import Function, is_target
from lockstep.script.source.lane_loops import is_over_lanes
from lockstep.script.source.module_hooks import filled_by_modules
from lockstep.script.source.scopes import variable_named
from lockstep.script.source.syntax import Loop, called, called_name, mentions, reads, variables_in, walked
from lockstep.script.source.uses import Uses


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
    anew = _begun_anew_for_lanes(loops, uses)
    may_carry = [loop for loop in setting if loop not in anew and not is_target(loop, key)]
    carrying = [loop for loop in may_carry if _carries(function, loop, uses)]
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


def _carries(function: Function, loop: Loop, uses: Uses) -> bool:
    """Whether a turn reads first, or what it sets under a condition alone is read elsewhere."""
    is_read = uses.read_first(loop.body)
    within = set(walked(loop))
    elsewhere = (node for node in function.around() if node not in within)
    return any(reads(node, uses.name) for node in elsewhere) if is_read is None else is_read


def _begun_anew_for_lanes(loops: list[Loop], uses: Uses) -> set[ast.AST]:
    """Loops over lanes, and those in them, where each turn around them sets the variable before it reads it: what
    lanes add up (`n = 0` before, `n += len(x)` inside) is nothing that another turn reads."""
    anew: set[ast.AST] = set()
    for loop in filter(is_over_lanes, loops):
        around = [one for one in loops if one is not loop and loop in walked(one)]
        if around and uses.read_first(around[-1].body) is False:
            anew.update(walked(loop))
    return anew


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
