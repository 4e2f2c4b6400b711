"""Statements that go on from what their own last run has left are found in the source."""

from pathlib import Path
from textwrap import dedent

import pytest

from lockstep.script.goes_on import attributes_that_go_on, outer_names_that_go_on

ATTRIBUTES = {
    "a counter": "def forward(self, x):\n    self.kept += 1",
    "a hidden state": "def forward(self, x):\n    self.kept = self.cell(x, self.kept)",
    "an average": "def forward(self, x):\n    self.kept = 0.9 * self.kept + 0.1 * x.mean()",
    "an average, in place": "def forward(self, x):\n    self.kept.mul_(0.9).add_(x.mean())",
    "a list": "def forward(self, x):\n    self.kept.append(x)",
    "an entry": "def forward(self, x):\n    self.kept['n'] += 1",
    "from outside": "def train(model):\n    model.kept = max(0.5, model.kept * 0.9)",
    "outside of functions": "model.kept = max(0.5, model.kept * 0.9)",
    "set before a loop over lanes": (
        "def evaluate(self):\n    self.kept = 0\n    for x in self.run.lanes(batch):\n        self.kept += len(x)"
    ),
}
OWN_ATTRIBUTES = {
    "set anew": "def forward(self, x):\n    self.kept = x.mean()",
    "set first, then changed": "def forward(self, x):\n    self.kept = 0\n    for y in x:\n        self.kept += y",
    "set first in the lane": (
        "def train(self):\n    for x in run.lanes(batch):\n        self.kept = 0\n        self.kept += len(x)"
    ),
    "made": "def __init__(self):\n    self.kept = 1\n    self.kept += 1",
    "overwritten in place": "def forward(self, x):\n    self.kept.copy_(x)",
    "a cache": "def forward(self, x):\n    self.kept[len(x)] = x",
}
NAMES = {
    "global": "def weight():\n    global kept\n    kept += 1",
    "of a function around it": (
        "def main():\n    kept = 0\n    def weight():\n        nonlocal kept\n        kept = kept + 1"
    ),
    "a table outside": "def weight():\n    kept['n'] += 1",
    "a list outside": "def weight(loss):\n    kept.append(loss)",
}
OWN_NAMES = {
    "its own": "def weight():\n    kept = 0\n    kept += 1",
    "an argument": "def weight(kept):\n    kept.append(1)",
    "in no function": "kept = 0\nkept += 1",
}


def written(source: str, tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(dedent(source))
    return str(path)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_goes_on_is_found_with_its_statement(name: str, tmp_path: Path) -> None:
    found = attributes_that_go_on(written(ATTRIBUTES[name], tmp_path))
    assert list(found) == ["kept"]
    assert "kept" in found["kept"]
    assert "(line " in found["kept"]


@pytest.mark.parametrize("name", OWN_ATTRIBUTES)
def test_an_attribute_that_does_not_is_not(name: str, tmp_path: Path) -> None:
    assert not attributes_that_go_on(written(OWN_ATTRIBUTES[name], tmp_path))


@pytest.mark.parametrize("name", NAMES)
def test_a_variable_outside_of_the_function_that_goes_on_is_found(name: str, tmp_path: Path) -> None:
    assert list(outer_names_that_go_on(written(NAMES[name], tmp_path))) == ["kept"]


@pytest.mark.parametrize("name", OWN_NAMES)
def test_a_variable_of_the_functions_own_is_not(name: str, tmp_path: Path) -> None:
    assert not outer_names_that_go_on(written(OWN_NAMES[name], tmp_path))


def test_a_source_that_cannot_be_read_shows_nothing(tmp_path: Path) -> None:
    assert not attributes_that_go_on(str(tmp_path / "not there"))
    assert not outer_names_that_go_on(written("def (", tmp_path))
