"""Tables that forward hooks fill are set by whoever calls the module."""

import ast

import pytest

from lockstep.script.source.functions import Function
from lockstep.script.source.module_hooks import filled_by_modules

HOOK = "def hook(module, args, output):\n    features['a'] = output\n"
MADE = "def keep(name):\n    def hook(module, args, output):\n        features[name] = output\n    return hook\n"


def modules(source: str, name: str = "features") -> set[str]:
    node = ast.parse(source)
    return set(filled_by_modules(Function(node, node), name).modules)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"{HOOK}model.register_forward_hook(hook)", {"model"}),
        (f"{HOOK}model.conv.register_forward_pre_hook(hook)", {"model", "model.conv"}),
        (f"{HOOK}self.model.layers[2].conv.register_forward_hook(hook)", {"self.model.layers", "self.model", "self"}),
        (f"{MADE}model.register_forward_hook(keep('a'))", {"model"}),
        (f"{MADE}model.get_submodule('conv').register_forward_hook(keep('a'))", {"model"}),
        (
            f"{MADE}for name, layer in model.named_modules():\n    layer.register_forward_hook(keep(name))",
            {"layer", "model"},
        ),
    ],
)
def test_they_are_those_on_which_the_hook_is_registered_and_what_they_are_parts_of(
    source: str, found: set[str]
) -> None:
    assert modules(source) == found


@pytest.mark.parametrize(
    "hook",
    [
        HOOK.replace("features", "others"),
        HOOK.replace("= output", "= 0.9 * features['a'] + output"),
        HOOK.replace("=", "+="),
        HOOK.replace("features['a']", "if module.training: features['a']"),
        HOOK.replace("features['a'] = output", "features.append(output)"),
        HOOK.replace("features['a']", "output = features"),
    ],
)
def test_a_hook_that_reads_the_table_or_fills_it_now_and_then_is_none(hook: str) -> None:
    assert modules(f"{hook}model.register_forward_hook(hook)") == set()


def test_a_function_that_is_registered_for_something_else_or_is_not_of_the_file_is_none() -> None:
    assert modules(f"{HOOK}model.register_full_backward_hook(hook)") == set()
    assert modules("from hooks import hook\nmodel.register_forward_hook(hook)") == set()
    assert modules(f"{HOOK}register_forward_hook(hook)\nmodel.register_forward_hook()") == set()


def test_an_attribute_is_filled_by_a_method() -> None:
    node = ast.parse(
        "class Trainer:\n    def __init__(self):\n        self.model.conv.register_forward_hook(self.keep)\n"
        "    def keep(self, module, args, output):\n        self.features['a'] = output\n"
    )
    trainer = Function(node.body[0], node)
    filled = filled_by_modules(trainer, "self.features")
    assert "self.model" in filled.modules
    assert [hook.name for hook in filled.hooks] == ["keep"]
