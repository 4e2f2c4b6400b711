"""Whether lanes train from what an earlier one has kept, by the source alone."""

from pathlib import Path

import pytest

from lockstep.script.lanes.dependence import lanes_train_from

IN_A_CLASS = """
class Trainer:
    def train(self, run, batch):
        for x in run.lanes(batch):
            run.backward(self.loss(x))
    def loss(self, x):
        return {read} * x.sum()
class Meter:
    def show(self):
        scale = 2
        run.backward(scale * self.total)
"""
TRAINED_FROM = {
    "a variable": ("for x in run.lanes(batch):\n    run.backward(loss(x) * scale)\n", False),
    "an attribute": ("for x in run.lanes(batch):\n    run.backward(loss(x) * meter.scale)\n", True),
    "a function's": ("def loss(x): return scale * x\nfor x in run.lanes(batch):\n    run.backward(loss(x))\n", False),
    "a method's": (IN_A_CLASS.format(read="self.scale"), True),
}
ONLY_KEPT = {
    "a variable": ("for x in run.lanes(batch):\n    run.backward(loss(x) * other)\n    print(scale)\n", False),
    "an attribute": ("for x in run.lanes(batch):\n    run.backward(loss(x) * m.other)\n    print(m.scale)\n", True),
    "around the loop": ("run.backward(scale)\nfor x in run.lanes(batch):\n    scale = x.mean()\n", False),
    "a function's": ("def show(): print(scale)\nfor x in run.lanes(batch):\n    run.backward(loss(x))\n", False),
    "a variable of another method": (IN_A_CLASS.format(read="self.other"), True),
}


def is_trained_from(text: str, is_attribute: bool, folder: Path) -> bool:
    path = folder / "train.py"
    path.write_text(text)
    line = next(number for number, one in enumerate(text.splitlines(), 1) if "run.lanes" in one)
    return lanes_train_from(str(path), line, str(path), "scale", is_attribute)


@pytest.mark.parametrize(("text", "is_attribute"), TRAINED_FROM.values(), ids=TRAINED_FROM)
def test_what_goes_into_the_loss_of_a_lane_is_trained_from(text: str, is_attribute: bool, tmp_path: Path) -> None:
    assert is_trained_from(text, is_attribute, tmp_path)


@pytest.mark.parametrize(("text", "is_attribute"), ONLY_KEPT.values(), ids=ONLY_KEPT)
def test_what_lanes_only_keep_is_not(text: str, is_attribute: bool, tmp_path: Path) -> None:
    assert not is_trained_from(text, is_attribute, tmp_path)
