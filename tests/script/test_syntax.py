"""The vocabulary for reading source: what a statement sets, changes and fills, and what is computed from what."""

import ast
from pathlib import Path

import pytest

from lockstep.script.source.computed import computed_from
from lockstep.script.source.scopes import mark, variable
from lockstep.script.source.statements import shown_by_functions
from lockstep.script.source.syntax import changed_by, filled_by, functions_of, is_outer, parts_set, variables_in, walked


def statement(code: str) -> ast.stmt:
    return ast.parse(code).body[0]


@pytest.mark.parametrize(
    ("code", "parts", "changed"),
    [
        ("w = 1", ["w"], {"w"}),
        ("w += 1", ["w"], {"w"}),
        ("a, (b, *c) = x", ["a", "b", "c"], {"a", "b", "c"}),
        ("a.b[i] = x", ["a.b[i]"], {"a", "a.b"}),
        ("self.b[i] = x", ["self.b[i]"], {"self.b"}),
        ("for w in x: pass", ["w"], {"w"}),
        ("with f() as w: pass", ["w"], {"w"}),
        ("w.append(1)", [], set()),
    ],
)
def test_what_a_statement_sets_and_which_variables_change_by_that(
    code: str, parts: list[str], changed: set[str]
) -> None:
    assert [ast.unparse(part) for part in parts_set(statement(code))] == parts
    assert changed_by(statement(code)) == changed


@pytest.mark.parametrize(
    ("code", "filled"),
    [
        ("w[:] = 0", {"w"}),
        ("w[...] = 0", {"w"}),
        ("w.copy_(x)", {"w"}),
        ("self.w.zero_()", {"self.w"}),
        ("w[1:] = 0", set()),
        ("w[0] = 0", set()),
        ("w.add_(x)", set()),
    ],
)
def test_what_is_filled_as_a_whole_keeps_nothing_of_what_it_held(code: str, filled: set[str]) -> None:
    found = (filled_by(node) for node in ast.walk(statement(code)))
    assert {variable(one) for one in found if one is not None} == filled


@pytest.mark.parametrize(
    ("code", "computed"),
    [
        ("a = 2 * w\nb = a", {"w", "a", "b"}),
        ("a = x\nb = a", {"w"}),
        ("if w > 2:\n    a = x", {"w", "a"}),
        ("for a in w:\n    b = a", {"w", "a", "b"}),
        ("self.a = w\nb = self.a", {"w", "self.a", "b"}),
        ("table[0] = w\nb = table[1]", {"w", "table", "b"}),
    ],
)
def test_what_is_computed_from_a_variable_is_followed_through_assignments_and_tests(
    code: str, computed: set[str]
) -> None:
    assert computed_from(walked(ast.parse(code)), ["w"]) == computed


def test_a_variable_is_outside_of_a_function_that_does_not_set_it_or_declares_it() -> None:
    function = statement("def f(a):\n    global g\n    g, own = a, outer\n    def inner(b): pass")
    assert isinstance(function, ast.FunctionDef)
    assert [is_outer(name, function) for name in ("a", "b", "own", "g", "outer")] == [False, False, False, True, True]


def test_statements_are_shown_by_the_attributes_and_the_outer_variables_that_they_are_found_for(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def f(self, x):\n    self.n = 1\n    table[x] = 2\n    own = 3\n    own[x] = 4\n")

    def find(function: ast.AST) -> list[tuple[ast.stmt, ast.expr]]:
        found = [one for one in ast.walk(function) if isinstance(one, ast.Assign)]
        return [(one, getattr(one.targets[0], "value", one.targets[0])) for one in found[1:]] + [
            (found[0], found[0].targets[0])
        ]

    shown = shown_by_functions(functions_of(str(path)), find)
    assert shown.attributes == {"n": "`self.n = 1` (line 2)"}
    assert shown.variables == {"table": "`table[x] = 2` (line 3)"}


def test_variables_of_a_tree_are_known_with_their_function() -> None:
    tree = ast.parse("w = 1\ndef f():\n    w = 2")
    mark(tree)
    assert variables_in(tree) == {"w", "f", "w@2:0"}
