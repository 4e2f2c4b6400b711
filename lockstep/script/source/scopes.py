"""Which variable a name stands for: those that a function has of its own are told apart from others. Pure."""

import ast

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (*_FUNCTIONS, *_COMPREHENSIONS, ast.ClassDef)


def mark(tree: ast.AST) -> None:
    """Every name of the tree knows from now on whose it is."""
    todo: list[tuple[ast.AST, tuple[tuple[frozenset[str], str], ...]]] = [(tree, ())]
    while todo:
        node, scopes = todo.pop()
        if isinstance(node, ast.Name | ast.FunctionDef | ast.ClassDef):
            name = node.id if isinstance(node, ast.Name) else node.name
            found = (place for own, place in reversed(scopes) if name in own)
            node.scope = next(found, "")  # type: ignore[union-attr]
        inner = (*scopes, (_own(node), place_of(node))) if isinstance(node, _SCOPES) else scopes
        methods = scopes if isinstance(node, ast.ClassDef) else inner  # do not see what their class has
        todo += [(child, methods if isinstance(child, _FUNCTIONS) else inner) for child in ast.iter_child_nodes(node)]


def is_marked(tree: ast.AST) -> bool:
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return hasattr(next(names, None), "scope")


def place_of(function: ast.AST) -> str:
    return f"@{getattr(function, 'lineno', 0)}:{getattr(function, 'col_offset', 0)}"


def variable(node: ast.AST) -> str | None:
    """The variable that is read or set there: `x`, with its function if it is one's own; `self.x`; `a.b.x`."""
    if isinstance(node, ast.Name):
        return node.id + getattr(node, "scope", "")
    if isinstance(node, ast.FunctionDef):
        return node.name + getattr(node, "scope", "")
    if isinstance(node, ast.Attribute):
        is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
        owner = "self" if is_own else variable(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def variable_named(name: str, within: ast.AST) -> str:
    """The variable that has this name in a function, a class (its attribute) or a module."""
    if isinstance(within, ast.ClassDef):
        return f"self.{name}"
    base, dot, rest = name.partition(".")
    found = {variable(node) for node in ast.walk(within) if isinstance(node, ast.Name) and node.id == base}
    own = base + place_of(within)
    known = own if own in found or not found else base if base in found else min(map(str, found))
    return ("self" if base == "self" else known) + dot + rest


def _own(scope: ast.AST) -> frozenset[str]:
    """Arguments, what is set or defined in it, and not declared to be another's."""
    own = (
        {one.arg for one in ast.walk(scope.args) if isinstance(one, ast.arg)}
        if isinstance(scope, _FUNCTIONS)
        else set[str]()
    )  # type: ignore
    outer: set[str] = set()
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                outer |= set(names)
        todo += [] if isinstance(node, _SCOPES) else ast.iter_child_nodes(node)
    return frozenset(own - outer)
