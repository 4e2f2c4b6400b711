"""Tables that forward hooks fill: each call of the module sets them. Pure.

# Note [Filled by hooks]
# This is how features are taken out of a model:
#
#     def keep(module, args, output): features["conv1"] = output
#     model.conv1.register_forward_hook(keep)
#
# Each call of the model sets the table, so what is read of it afterwards is no state. A hook that reads the table (a
# running mean), or fills it under a condition, may leave something for the next call.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.script.source.functions import Function
from lockstep.script.source.scopes import variable
from lockstep.script.source.syntax import walked

_REGISTERS = frozenset({"register_forward_hook", "register_forward_pre_hook"})


@dataclass(frozen=True)
class FilledBy:
    """Variables with modules, or parts of them, whose call fills a table, and the hooks that do so."""

    modules: frozenset[str]
    hooks: tuple[ast.FunctionDef, ...]


def filled_by_modules(function: Function, name: str) -> FilledBy:
    """What fills the table by this name. See Note [Filled by hooks]."""
    nodes = function.around()
    modules, hooks = set[str](), list[ast.FunctionDef]()
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=module, attr=attr), args=[hook, *_]) if attr in _REGISTERS:
                filling = [one for one in _hooks(hook, function) if _fills(one, name)]
                hooks += filling
                modules |= set(_owners(module, nodes)) if filling else set()
    return FilledBy(frozenset(modules), tuple(hooks))


def _owners(part: ast.AST, nodes: tuple[ast.AST, ...]) -> Iterator[str]:
    """The part of a module, and what it is a part of; of the variable of a loop, what the loop goes through."""
    name = variable(part)
    if name is not None:
        yield name
        loops = (one for one in nodes if isinstance(one, ast.For))
        for loop in loops:
            if any(variable(target) == name for target in ast.walk(loop.target)):
                yield from _owners(loop.iter, ())
    match part:
        case ast.Call(func=ast.Attribute(value=inner)) | ast.Attribute(value=inner) | ast.Subscript(value=inner):
            yield from _owners(inner, nodes)


def _hooks(hook: ast.expr, function: Function) -> list[ast.FunctionDef]:
    """The function; where it is made by a call of one, those that are defined in that."""
    maker = hook.func if isinstance(hook, ast.Call) else hook
    known = function.functions().get(variable(maker) or "")
    if known is None or maker is hook:
        return [] if known is None else [known]
    return [one for one in walked(known) if isinstance(one, ast.FunctionDef) and one is not known]


def _fills(hook: ast.FunctionDef, name: str) -> bool:
    """Whether it fills the table whenever it is called, and does nothing else with it."""
    filled = {
        id(target.value)
        for statement in hook.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Subscript) and variable(target.value) == name
    }
    return bool(filled) and not any(variable(node) == name and id(node) not in filled for node in walked(hook))
