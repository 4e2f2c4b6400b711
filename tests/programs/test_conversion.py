"""`lockstep init`: what a plain script becomes, and what it says where the source does not show how."""

import re
import subprocess
from pathlib import Path

import pytest
from launches import REPOSITORY, launch, start_lockstep

from lockstep.programs.conversion.edits import Conversion, convert, difference
from lockstep.programs.conversion.source import CannotSee

PLAIN = (REPOSITORY / "examples" / "01_plain.py").read_text()

FUNCTIONS = '''
"""As the well-known script for MNIST: functions that are handed all they need."""
from __future__ import print_function
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def train(model, device, train_loader, optimizer, epoch):
    model.train()
    for data, target in train_loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()


def main():
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(100, 4), torch.randint(0, 3, (100,)))
    train_loader = DataLoader(
        data,
        batch_size=16,
        shuffle=True,
    )
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(3):
        train(model, "cpu", train_loader, optimizer, epoch)
        scheduler.step()
    DIGEST


if __name__ == "__main__":
    main()
'''


def test_the_difference_is_what_patch_takes_and_the_script_prints_its_losses_on_two_workers(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text(PLAIN)
    ended = start_lockstep("init", "plain.py", cwd=tmp_path)
    shown, said = ended.communicate(timeout=60)
    assert ended.returncode == 0, said
    assert path.read_text() == PLAIN
    assert "lanes=N" in said
    assert sum(line.startswith("+") for line in shown.splitlines()) - 1 == 10
    subprocess.run(["patch", "-s", "plain.py"], input=shown, text=True, cwd=tmp_path, check=True)
    printed = set()
    for workers in ("1", "2", "3"):
        with launch(tmp_path / workers, path.read_text(), "-n", workers, "--lanes", "8") as run:
            assert run.finish() == 0, run.shown()
        printed.add(tuple(line for line in run.lines if "loss of the last batch" in line or "new points" in line))
    assert len(printed) == 1
    assert len(next(iter(printed))) == 7
    assert re.search(r"right on 2\d\d of 300 new points", run.shown())


def test_functions_that_are_handed_model_and_loader_are_seen_through(tmp_path: Path) -> None:
    text = FUNCTIONS.replace("DIGEST", "print('weights', float(model.weight.double().sum()))")
    text = text.replace("for data, target in train_loader", "for number, (data, target) in enumerate(train_loader)")
    converted = convert(text).text
    assert "run = lockstep.start()\n" in converted
    assert "    run.replicate(model, optimizer, scheduler=scheduler)\n" in converted
    assert "    for number, (data, target) in run.steps(enumerate(train_loader)):\n" in converted
    assert "    for epoch in run.epochs(3):\n" in converted
    found = set()
    for workers in ("1", "2"):
        with launch(tmp_path / workers, converted, "-n", workers, "--lanes", "4") as run:
            assert run.finish() == 0, run.shown()
        found.add(next(line for line in run.lines if line.startswith("weights ")))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("zero_grad()\n", "zero_grad()\n            total += loss.item()\n", "would add up the lanes of one worker"),
        ("optimizer.step()", "clip_grad_norm_(model.parameters(), 1); optimizer.step()", "of the whole batch"),
        ("optimizer.step()", "optimizer.step(); scheduler.step()", r"`scheduler.step\(\)` happens once for each batch"),
        ("optimizer.step()", "pass", "never calls optimizer.step"),
        ("optimizer.zero_grad()", "break", "`break` would leave a batch"),
        ("loss.backward()", "loss.mean()", "no training loop to see"),
        ("    loader = DataLoader(train, batch_size=96)", "    loader = make(train)", "no single `loader = DataLoader"),
        ("for x, y in loader", "for x, y in make(loader)", r"the loop reads `make\(loader\)`"),
        ("model.parameters()", "[*weights]", "no `optimizer = "),
        ("torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)", "next(model.parameters())", "without one"),
        ("import torch\n", "import torch, lockstep\n", "imports lockstep already"),
        ("def main", "def", "Python cannot read it"),
        ("    loader =", "    optimizer = torch.optim.SGD(model.parameters())\n    loader =", "made in several places"),
        ("    optimizer = ", "    if train: optimizer = ", "several statements share a line"),
    ],
)
def test_what_cannot_be_seen_is_named(before: str, after: str, why: str) -> None:
    assert before in PLAIN
    with pytest.raises(CannotSee, match=why):
        convert(PLAIN.replace(before, after))


def converted_with(before: str, after: str) -> Conversion:
    assert before in PLAIN
    return convert(PLAIN.replace(before, after))


@pytest.mark.parametrize("value", ["loss.item()", "float(loss)", "loss.detach().cpu().item()", "loss.data.item()"])
def test_a_loss_that_is_read_after_the_loop_becomes_that_of_the_batch(value: str) -> None:
    conversion = converted_with("{loss.item():.6f}", f"{{{value}:.6f}}")
    assert "            run.backward(loss)\n" in conversion.text
    assert 'run.print(f"epoch {epoch}  loss of the last batch {run.loss:.6f}")' in conversion.text
    assert not any("loss" in remark for remark in conversion.remarks)


def test_what_is_read_of_the_last_lane_after_the_loop_is_named() -> None:
    after = "print(loss.item(), loss.exp(), x.mean())"
    conversion = converted_with('print(f"epoch {epoch}  loss of the last batch {loss.item():.6f}")', after)
    assert "run.print(run.loss, loss.exp(), x.mean())" in conversion.text
    said = [remark for remark in conversion.remarks if "this worker's last lane" in remark]
    assert [remark.split(" ")[0] for remark in said] == ["`loss`", "`x`"]


def test_a_print_in_the_loop_prints_once_for_a_batch_and_a_remark_says_what() -> None:
    conversion = converted_with("optimizer.zero_grad()", "optimizer.zero_grad()\n            print(loss.item())")
    assert "            run.print(loss.item())\n" in conversion.text
    assert any("first lane of a batch" in remark for remark in conversion.remarks)


def test_names_that_are_set_anew_after_the_loop_and_other_functions_are_left_alone() -> None:
    after = "for x, y in [test.tensors]:\n            loss = x.sum()\n            float(loss)"
    conversion = converted_with('print(f"epoch {epoch}  loss of the last batch {loss.item():.6f}")', after)
    assert "loss.backward()" in conversion.text
    assert "run.loss" not in conversion.text
    assert not any("last lane" in remark for remark in conversion.remarks)
    conversion = converted_with("def main", "def other():\n    print(1)\n\n\ndef main")
    assert "\n    print(1)\n" in conversion.text
    assert any("print (line 23) prints on every worker" in remark for remark in conversion.remarks)


@pytest.mark.parametrize(
    ("statement", "is_named"),
    [
        ("torch.save(model.state_dict(), 'best.pt')", True),
        ("pyplot.savefig('losses.png')", True),
        ("log = open('log.csv', 'a')", True),
        ("open('in')", False),
    ],
)
def test_what_each_worker_would_write_is_named(statement: str, is_named: bool) -> None:
    conversion = converted_with("def main", f"def other():\n    {statement}\n\n\ndef main")
    named = [remark for remark in conversion.remarks if "(line 23) writes on every worker" in remark]
    assert bool(named) == is_named


def test_a_script_that_cannot_be_converted_ends_with_1_and_the_reasons(tmp_path: Path) -> None:
    (tmp_path / "gan.py").write_text(PLAIN.replace("optimizer.step()", "optimizer.step(); other.step()"))
    ended = start_lockstep("init", "gan.py", cwd=tmp_path)
    shown, said = ended.communicate(timeout=60)
    assert (ended.returncode, shown) == (1, "")
    assert "✗ gan.py, line 33: `other.step()` happens once for each batch" in said


def test_a_difference_of_nothing_is_nothing() -> None:
    assert difference(PLAIN, PLAIN, "plain.py") == ""
