"""Statements that go on from what their own last run has left are found in the source."""

from pathlib import Path
from textwrap import dedent

import pytest

from lockstep.script.lanes.draws import seeded_in_lanes
from lockstep.script.source.goes_on import gone_on_in

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
    found = gone_on_in(written(ATTRIBUTES[name], tmp_path)).attributes
    assert list(found) == ["kept"]
    assert "kept" in found["kept"]
    assert "(line " in found["kept"]


@pytest.mark.parametrize("name", OWN_ATTRIBUTES)
def test_an_attribute_that_does_not_is_not(name: str, tmp_path: Path) -> None:
    assert not gone_on_in(written(OWN_ATTRIBUTES[name], tmp_path)).attributes


OF_A_PASS = """
    def train(model, loader):
        {before}
        for epoch in run.epochs(3):
            {each_epoch}
            for batch in loader:
                {each_batch}
                for x in run.lanes(batch):
                    model(x).sum().backward()
                model.kept *= 0.9
"""
STEPS = """
    def train(model, loader):
        {before}
        while run.step < 100:
            {each_epoch}
            for x in run.steps(loader):
                {each_batch}
                model.kept *= 0.9
"""
SETS = "model.kept = 2.0"


@pytest.mark.parametrize("source", [OF_A_PASS, STEPS])
@pytest.mark.parametrize(
    ("where", "within", "over_passes"),
    [("before", True, True), ("each_epoch", True, False), ("each_batch", False, False), ("nowhere", True, True)],
)
def test_where_an_attribute_is_set_says_how_far_it_is_carried(
    source: str, where: str, within: bool, over_passes: bool, tmp_path: Path
) -> None:
    places = dict.fromkeys(("before", "each_epoch", "each_batch"), "pass") | {where: SETS}
    path = written(source.format(**places), tmp_path)
    assert bool(gone_on_in(path).attributes) == within
    assert bool(gone_on_in(path, over_passes=True).attributes) == over_passes


def test_a_statement_in_the_lanes_is_in_a_pass_too(tmp_path: Path) -> None:
    source = OF_A_PASS.format(before="pass", each_epoch=SETS, each_batch="pass")
    path = written(source.replace("model(x).sum().backward()", "model.kept *= 0.9"), tmp_path)
    assert gone_on_in(path).attributes
    assert not gone_on_in(path, over_passes=True).attributes


def test_a_function_that_makes_one_pass_sets_it_for_that_pass(tmp_path: Path) -> None:
    source = "def epoch():\n    model.kept = 2\n    for x in run.steps(loader):\n        model.kept *= 0.9"
    path = written(source, tmp_path)
    assert gone_on_in(path).attributes
    assert not gone_on_in(path, over_passes=True).attributes


@pytest.mark.parametrize("name", NAMES)
def test_a_variable_outside_of_the_function_that_goes_on_is_found(name: str, tmp_path: Path) -> None:
    assert list(gone_on_in(written(NAMES[name], tmp_path)).variables) == ["kept"]


@pytest.mark.parametrize("name", OWN_NAMES)
def test_a_variable_of_the_functions_own_is_not(name: str, tmp_path: Path) -> None:
    assert not gone_on_in(written(OWN_NAMES[name], tmp_path)).variables


def test_a_source_that_cannot_be_read_shows_nothing(tmp_path: Path) -> None:
    assert not gone_on_in(str(tmp_path / "not there")).attributes
    assert not gone_on_in(written("def (", tmp_path)).variables


SEEDED = {
    "in a loop over lanes": "for x in run.lanes(b):\n    noise.manual_seed(run.step)\n    seed(1)\n    new().seed(1)",
    "where it is drawn from": (
        "def forward(self, x):\n    self.noise.manual_seed(1)\n    return x + torch.randn(3, generator=self.noise)"
    ),
}
NOT_SEEDED = {
    "before the loop": "def train():\n    noise.manual_seed(1)\n    for x in run.lanes(batch): loss(x, noise)",
    "where nothing draws": "def begin(noise):\n    noise.manual_seed(1)",
    "drawn from alone": "for x in run.lanes(batch):\n    x.normal_(generator=noise)\n    noise.random()",
    "no Python": "for x in run.lanes(batch)",
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_generator_that_is_set_in_each_lane_is_found(name: str, tmp_path: Path) -> None:
    assert "noise" in seeded_in_lanes(written(SEEDED[name], tmp_path))


@pytest.mark.parametrize("name", NOT_SEEDED)
def test_one_that_lanes_only_draw_from_is_not(name: str, tmp_path: Path) -> None:
    assert "noise" not in seeded_in_lanes(written(NOT_SEEDED[name], tmp_path))
