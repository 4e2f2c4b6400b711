"""What code hands on to its own next run, as its source shows it."""

import ast
from textwrap import dedent

import pytest

from lockstep.script.lanes.detours import handed_on
from lockstep.script.source.uses import Uses


def found(code: str) -> set[str]:
    return {ast.unparse(target) for _, target in handed_on(ast.parse(dedent(code)).body)}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("h = state\nstate = f(x, h)", {"state"}),
        ("h = self.h\nh = f(h)\nself.h = h", {"self.h"}),
        ("w = seen.get(k)\nseen[k] = v\n(loss * w).backward()", {"seen"}),
        ("w = seen.get(k)\nseen[k] = v\nprint(w)", set()),
        ("if loss < best:\n    best = loss\nrun.backward(loss / best)", {"best"}),
        ("if loss < best:\n    best = loss\nprint(best)", set()),
        ("if big:\n    loss = a\nelse:\n    loss = b\nloss.backward()", set()),
        ("if big:\n    loss = a\nloss.backward()\nloss = a", {"loss"}),
        ("with no_grad():\n    loss = a\nloss.backward()", set()),
        ("for part in parts:\n    y = part\ny.backward()\ny = 0", set()),
        ("taken = now() - at\nat = now()\nprint(taken)", set()),
        ("taken, at = now() - at, now()\nprint(taken)", set()),
        ("loss, at = f(at), now()\nloss.backward()", {"at"}),
        ("self.shown = f(x)\nprint(self.shown)", set()),
        ("h = f(x)\nself.h = h", set()),
        ("y = f(x, h)\nself.h = y", set()),
        ("a, h = f(x, h)", {"h"}),
        ("def inner():\n    return state\nstate = f(x)", set()),
    ],
)
def test_what_is_read_before_it_is_set_and_matters_is_handed_on(code: str, names: set[str]) -> None:
    assert found(code) == names


def test_the_result_of_a_function_counts() -> None:
    function = ast.parse("def f(x):\n    y = x + memo[0]\n    memo[0] = x\n    return y").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert [ast.unparse(target) for _, target in handed_on(function.body)] == ["memo"]


@pytest.mark.parametrize(
    ("code", "reads"),
    [
        ("x = 1\ny = x", False),
        ("x += 1", True),
        ("x[0] = 1", None),
        ("x[0] += 1", True),
        ("x[x[0]] = 1", True),
        ("for x in y:\n    pass", False),
        ("while x:\n    pass", True),
        ("try:\n    x = 1\nfinally:\n    y = x", False),
        ("if a:\n    x = 1\nz = x", True),
        ("with a as x:\n    y = x", False),
        ("(a, [x, *b]) = c", False),
    ],
)
def test_whether_code_reads_a_name_before_it_sets_it(code: str, reads: bool | None) -> None:
    assert Uses("x", by_element=True).read_first(ast.parse(code).body) is reads
