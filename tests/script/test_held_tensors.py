"""Tensors that a script holds by itself, such as an average of the weights, and that begin anew after a resume."""

from pathlib import Path

import pytest
from launches import launch

SCRIPT = """
import copy, os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lockstep

class Average:
    def __init__(self, model):
        self.decay, self.mean = 0.9, {{n: p.detach().clone() for n, p in model.named_parameters()}}
    def update(self, model):
        self.mean = {{n: 0.9 * self.mean[n] + 0.1 * p.detach() for n, p in model.named_parameters()}}
    def state_dict(self):
        return dict(self.mean)
    def load_state_dict(self, state):
        self.mean = {{n: p.clone() for n, p in state.items()}}

run = lockstep.start(lanes=2, seed=0)
torch.manual_seed(0)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.randn(32, 4)
{make}
run.checkpoints("checkpoints", every_steps=2)
loader = run.shard(DataLoader(TensorDataset(data), 8))
for epoch in run.epochs(int(os.environ["EPOCHS"])):
    for batch in loader:
        for (x,) in run.lanes(batch):
            out = model(x)
            out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        {update}
"""
UNTRACKED = "ema = {make}\nrun.replicate(model, optimizer)"
HELD = {
    "module": (
        UNTRACKED.format(make="copy.deepcopy(model)"),
        "for p, q in zip(ema.parameters(), model.parameters()): p.detach().lerp_(q.detach(), 0.1)",
    ),
    "table": (
        UNTRACKED.format(make="{n: p.detach().clone() for n, p in model.named_parameters()}"),
        "ema = {n: 0.9 * ema[n] + 0.1 * p.detach() for n, p in model.named_parameters()}",
    ),
    "object": (UNTRACKED.format(make="Average(model)"), "ema.update(model)"),
}
TRACKED = ("ema = Average(model)\nrun.replicate(model, optimizer, ema=ema)", "ema.update(model)")


def resumed(folder: Path, make: str, update: str) -> str:
    """What is shown by a run that goes on from a checkpoint of an earlier one."""
    script = SCRIPT.format(make=make, update=update)
    with launch(folder, script, "-n", "2", EPOCHS="1") as first:
        assert first.finish() == 0, first.shown()
    assert "begin anew" not in first.shown()
    with launch(folder, script, "-n", "1", "--resume", "auto", EPOCHS="2") as second:
        assert second.finish() == 0, second.shown()
    return second.shown()


@pytest.mark.parametrize("how", HELD)
def test_an_average_of_the_weights_that_nobody_tracks_is_told_after_a_resume(tmp_path: Path, how: str) -> None:
    shown = resumed(tmp_path, *HELD[how])
    assert "tensors in `ema` (train.py) had changed in training, and begin anew" in shown
    assert "give it to run.replicate(..., name=object)" in shown
    assert shown.count("begin anew") == 1, shown


def test_an_average_that_is_tracked_goes_on_and_nothing_is_told(tmp_path: Path) -> None:
    assert "begin anew" not in resumed(tmp_path, *TRACKED)


@pytest.mark.parametrize("slot", [0, 2])
def test_a_newcomer_says_that_its_average_begins_anew(tmp_path: Path, slot: int) -> None:
    script = SCRIPT.format(make=HELD["module"][0], update=HELD["module"][1])
    variables = {"EPOCHS": "2", "LOCKSTEP_FAULT": f"replace {slot} at 3"}
    with launch(tmp_path, script, "-n", "3", "--no-copies", **variables) as run:
        assert run.finish() == 0, run.shown()
    log = (run.run_dir / f"worker-{slot}.log").read_text()
    assert "tensors in `ema` (train.py) had changed in training, and begin anew" in run.shown() + log, log
