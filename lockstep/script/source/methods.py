"""Which attributes the methods of a class store, and together with which others, read from the source. Pure."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from lockstep.script.source.syntax import called_name, called_on, nodes_of, walked

_INNER = frozenset({"forward", "__call__", "__getitem__", "__getitems__", "__iter__", "__next__"})
_MAKES = frozenset({"__init__", "__post_init__", "__setstate__"})
_CHANGES = frozenset({"append", "extend", "insert", "add", "update", "setdefault", "pop", "popleft", "appendleft"})
"""Methods of containers that change what they hold."""
_REGISTERS = frozenset({"register_buffer", "register_parameter", "setattr"})


@dataclass(frozen=True)
class Method:
    """What a method stores in `self`; `is_inner` if it computes a lane, or a sample, or is called by one that does."""

    stores: frozenset[str]
    registers: bool
    """Whether it makes buffers, or stores under names that the source does not show."""
    is_inner: bool
    fills: frozenset[str]
    """The attributes of which it changes what they hold: `self.cache[i] = x`, `self.seen.add(x)`."""


@lru_cache(maxsize=256)
def methods_of(path: str, name: str) -> tuple[Method, ...]:
    """The methods of a class of a file, except those that make its objects."""
    classes = (node for node in nodes_of(path) if isinstance(node, ast.ClassDef) and node.name == name)
    body = next((one.body for one in classes), [])
    methods = {one.name: one for one in body if isinstance(one, ast.FunctionDef)}
    inner = set(_INNER & methods.keys())
    while new := {call for one in inner for call in _own_calls(methods[one]) if call in methods} - inner:
        inner |= new
    return tuple(
        Method(frozenset(_stored(one)), _registers(one), name in inner, frozenset(_filled(one)))
        for name, one in methods.items()
        if name not in _MAKES
    )


def _stored(method: ast.FunctionDef) -> Iterator[str]:
    for node in walked(method):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _filled(method: ast.FunctionDef) -> Iterator[str]:
    for node in walked(method):
        is_element = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        held = node.value if is_element else called_on(node, _CHANGES)  # type: ignore[attr-defined]
        if isinstance(held, ast.Attribute) and _is_self(held.value):
            yield held.attr


def _own_calls(method: ast.FunctionDef) -> Iterator[str]:
    for node in walked(method):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_self(node.func.value):
            yield node.func.attr


def _registers(method: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Call) and called_name(node) in _REGISTERS for node in walked(method))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
