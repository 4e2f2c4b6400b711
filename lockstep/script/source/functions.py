"""A function, or a class, of a file with all that belongs to it: what it inherits from, calls, and does in loops. Pure.

Source that cannot be read, or parsed, shows nothing.
"""

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from lockstep.script.source.scopes import is_marked, mark, variable, variable_named
from lockstep.script.source.syntax import (
    ASSIGNS,
    DEFINES,
    LOOPS,
    Loop,
    called_name,
    changed_by,
    mentions,
    parsed,
    sets,
    walked,
    written,
)


@dataclass(frozen=True)
class Function:
    """The source of a function, or class, of a file; of a module, what is outside of functions too."""

    node: ast.AST
    file: ast.Module | None = None

    def __post_init__(self) -> None:
        if not is_marked(self.file or self.node):
            mark(self.file or self.node)

    def around(self) -> tuple[ast.AST, ...]:
        """All nodes of the file."""
        return walked(self.file or self.node)

    def bodies(self) -> list[ast.AST]:
        """The function; of a class, those of the file that it inherits from too."""
        bodies = [self.node]
        known = {one.name: one for one in self.around() if isinstance(one, ast.ClassDef)}
        for body in bodies:
            bases = [known.get(written(base) or "") for base in getattr(body, "bases", ())]
            bodies += [base for base in bases if base is not None and base not in bodies]
        return bodies

    def functions(self) -> Mapping[str, ast.FunctionDef]:
        """Those that it may call by their names: of the file, or methods of its own."""
        return _functions_of(self)

    def loops(self) -> list[Loop]:
        return [node for body in self.bodies() for node in walked(body) if isinstance(node, LOOPS)]

    def with_called(self, parts: Iterable[ast.AST]) -> list[ast.AST]:
        """The parts, and the functions of the file that they call, or that those call."""
        found, functions = list(parts), self.functions()
        for part in found:
            named = (functions.get(variable(node) or "") for node in walked(part))
            found += [one for one in named if one is not None and one is not self.node and one not in found]
        return found

    def repeated(self) -> list[ast.AST]:
        """What is done more than once: loops, what they call, and methods without any that do not make the object."""
        functions, loops = self.functions(), list[ast.AST](self.loops())
        if isinstance(self.node, ast.ClassDef):
            methods = [one for name, one in functions.items() if name.startswith("self.") and one.name != "__init__"]
            loops += [one for one in methods if not any(isinstance(node, LOOPS) for node in walked(one))]
        elif not loops and not isinstance(self.node, ast.Module):
            return [self.node]
        return self.with_called(loops)

    def is_reset(self, name: str) -> bool:
        """Whether a loop sets the name to its first value again: as its own variable, or inside of it."""
        key = variable_named(name, self.node)
        inside = (node for loop in self.loops() for node in walked(loop) if isinstance(node, ast.Assign))
        constant = (node for node in inside if isinstance(node.value, ast.Constant))
        return self.is_loop_variable(name) or any(mentions(one, {key}) for node in constant for one in node.targets)

    def is_compared(self, name: str) -> bool:
        """Whether the file compares the name with something, or takes the greater or the smaller of both."""
        key = variable_named(name, self.node)
        nodes = [node for part in (self.file or self.node, *self.bodies()) for node in walked(part)]
        comparing = [node for node in nodes if isinstance(node, ast.Compare) or _is_extreme(node)]
        return any(mentions(node, {key}) for node in comparing)

    def is_stepped(self, name: str) -> bool:
        """Whether it is changed by what it was (`w *= 0.9`, `w = 0.9 * w`), and set in no other way in loops."""
        steps = self._steps(name)
        return bool(steps) and all(steps)

    def is_summed_up(self, name: str) -> bool:
        """Whether it is changed by what it was, and may be set in other ways too."""
        return any(self._steps(name))

    def _steps(self, name: str) -> list[bool]:
        """Of every statement in loops that sets it: whether it goes on from what it was."""
        key = variable_named(name, self.node)
        nodes = [node for part in self.with_called(self.loops()) for node in walked(part)]
        return [
            isinstance(node, ast.AugAssign) or (isinstance(node.value, ast.BinOp) and mentions(node.value, {key}))
            for node in nodes
            if isinstance(node, ASSIGNS) and key in changed_by(node)
        ]

    def is_set_in_loop(self, name: str) -> bool:
        """Whether a loop sets the name itself, not only what it refers to."""
        key = variable_named(name, self.node)
        return any(sets(part, key) for part in self.with_called(self.loops()))

    def is_loop_variable(self, name: str) -> bool:
        key = variable_named(name, self.node)
        return any(is_target(loop, key) for loop in self.loops())


def is_target(node: ast.AST, name: str) -> bool:
    """Whether it is a `for` that sets the name."""
    return isinstance(node, ast.For) and mentions(node.target, {name})


def _is_extreme(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and called_name(node) in ("min", "max")


@lru_cache(maxsize=32)
def _functions_of(function: Function) -> Mapping[str, ast.FunctionDef]:
    bodies = function.bodies()
    nodes = [node for body in (function.file or function.node, *bodies) for node in walked(body)]
    methods = {id(one) for node in nodes if isinstance(node, ast.ClassDef) for one in node.body}
    free = {variable(one) or "": one for one in nodes if isinstance(one, ast.FunctionDef) and id(one) not in methods}
    own = [one for body in reversed(bodies) if isinstance(body, ast.ClassDef) for one in body.body]
    return free | {f"self.{one.name}": one for one in own if isinstance(one, ast.FunctionDef)}


def function_at(path: str, name: str) -> Function | None:
    """The function, or class, `name` of a file; the whole file for `<module>`."""
    tree = parsed(path)
    if tree is None or name == "<module>":
        return None if tree is None else Function(tree, tree)
    definitions = [node for node in walked(tree) if isinstance(node, DEFINES) and node.name == name]
    return Function(definitions[-1], tree) if definitions else None
