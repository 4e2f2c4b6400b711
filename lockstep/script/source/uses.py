"""Whether code reads a variable before it sets it: then it goes on from what stood there before the code ran. Pure."""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.script.source.scopes import variable
from lockstep.script.source.syntax import DEFINES, bare, filled_by, parts_set, reads, sets, walked


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
