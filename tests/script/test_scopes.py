"""Which mentions of a name in a file are the same variable."""

import ast

import pytest

from lockstep.script.source.scopes import mark, variable, variable_named

MENTIONS = {
    "a function's own": ("w = 1\ndef f():\n    w = 2\n    return w\nw", [0, 1, 1, 0]),
    "what a function reads": ("w = 1\ndef f():\n    return w", [0, 0]),
    "what a function sets as global": ("w = 1\ndef f():\n    global w\n    w = 2", [0, 0]),
    "an argument": ("def f(w):\n    return w\nw", [0, 1]),
    "what a function around it has": ("def f():\n    w = 1\n    def g():\n        return w\nw", [0, 0, 1]),
    "what a function inside has": ("def f():\n    def g():\n        w = 1\n    return w\nw", [0, 1, 1]),
    "what a function sets in one around it": (
        "def f():\n    w = 1\n    def g():\n        nonlocal w\n        w = 2\nw",
        [0, 0, 1],
    ),
    "what a class has": ("class A:\n    w = 1\n    v = w\nw", [0, 0, 1]),
    "what a method reads": ("class A:\n    w = 1\n    def f(self):\n        return w\nw", [0, 1, 1]),
    "what a comprehension goes through": ("v = [w for w in v]\nw", [0, 0, 1]),
    "an argument of a lambda": ("v = lambda w: w\nw", [0, 1]),
    "a function's own function": ("def f():\n    def w(): pass\n    w()\nw()", [0, 0, 1]),
    "a function's own class": ("def f():\n    class w: pass\n    w()\nw()", [0, 1]),
    "an attribute": ("w.v = 1\nself.w = 2\nw", [0, 0]),
}


@pytest.mark.parametrize(("text", "wanted"), MENTIONS.values(), ids=MENTIONS)
def test_mentions_of_a_name_are_told_apart_by_the_function_that_they_belong_to(text: str, wanted: list[int]) -> None:
    tree = ast.parse(text)
    mark(tree)
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.FunctionDef)]
    mentions = [node for node in named if (node.id if isinstance(node, ast.Name) else node.name) == "w"]
    found = [variable(node) for node in sorted(mentions, key=lambda node: (node.lineno, node.col_offset))]
    assert [list(dict.fromkeys(found)).index(one) for one in found] == wanted


@pytest.mark.parametrize(
    ("text", "name", "is_own"),
    [
        ("def f():\n    w = 1", "w", True),
        ("def f():\n    w = [v for v in x]", "w", True),
        ("def f():\n    return w", "w", False),
        ("def f():\n    return v + w", "w", False),
        ("def f(args):\n    return args.w", "args.w", True),
        ("def f():\n    return args.w", "args.w", False),
        ("def f():\n    pass", "w", True),
        ("def f():\n    v = 1", "w", True),
    ],
)
def test_a_name_in_a_function_is_its_own_where_it_sets_it_and_the_files_where_it_reads_it(
    text: str, name: str, is_own: bool
) -> None:
    tree = ast.parse(text)
    mark(tree)
    base, dot, rest = name.partition(".")
    assert variable_named(name, tree.body[0]) == (f"{base}@1:0" if is_own else base) + dot + rest


def test_a_name_that_only_a_function_inside_has_is_that() -> None:
    tree = ast.parse("def f():\n    def g():\n        w = 1")
    mark(tree)
    assert variable_named("w", tree.body[0]) == "w@2:4"
    assert variable_named("w", tree) == "w@2:4"


def test_a_name_of_a_function_and_of_one_inside_is_that_of_the_function() -> None:
    tree = ast.parse("\n" * 8 + "def f():\n    def g():\n        w = 1\n    w = 2")
    mark(tree)
    assert variable_named("w", tree.body[0]) == "w@9:0"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("self.w", "self.w"), ("args.w", "args.w"), ("args.of.w", "args.of.w"), ("f().w", None), ("f()", None)],
)
def test_an_attribute_is_a_variable_where_a_name_stands_in_front(text: str, wanted: str | None) -> None:
    assert variable(ast.parse(text, mode="eval").body) == wanted


def test_attributes_of_self_are_those_of_the_object_everywhere() -> None:
    tree = ast.parse("class A:\n    def f(self):\n        return self.w")
    mark(tree)
    assert isinstance(tree.body[0], ast.ClassDef)
    assert {variable_named("w", tree.body[0]), variable_named("self.w", tree.body[0].body[0])} == {"self.w"}
