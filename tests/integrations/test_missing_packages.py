"""An integration whose package is not installed says so, and which extra has it."""

import importlib
from importlib.util import find_spec

import pytest

from lockstep.errors import BadEnvironment


@pytest.mark.parametrize(
    ("package", "homes"), [("transformers", ["transformers"]), ("lightning", ["lightning", "pytorch_lightning"])]
)
def test_a_missing_package_is_named_with_its_extra(package: str, homes: list[str]) -> None:
    if any(find_spec(home) is not None for home in homes):
        pytest.skip(f"{package} is installed here")
    with pytest.raises(BadEnvironment, match=rf"torch-lockstep\[{package}\]"):
        importlib.import_module(f"lockstep.integrations.{package}")
