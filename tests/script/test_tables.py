"""Rows of a table that lanes write by an index are found in the source, and noted on several workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_lane_state import X, Y, notes
from torch import Tensor, nn

from lockstep import Run
from lockstep.script.lanes.tables import may_have_rows, rows_in, rows_of_lanes

INDEX = torch.arange(8)
WRITTEN = {
    "by subscript": "bank[index] = out.detach()",
    "by two": "bank[index, 0] = 1.0",
    "one by one": "bank[0][index] = 1.0",
    "through data": "bank.data[index] = out.detach()",
    "through numpy": "bank.numpy()[index] = 0",
    "by a method": "bank.index_copy_(0, index, out.detach())",
    "by a method of data": "bank.data.scatter_(0, index, out)",
    "into a view": "bank[int(index[0])].copy_(out)",
    "in a loop": """for i, loss in zip(index.tolist(), losses):
                bank[i] = loss""",
    "by update": "bank.update(zip(index.tolist(), losses))",
    "by what is computed from it": """where = 2 * index
            bank[where] = out""",
    "where it is there": """if None is not bank:
                bank[index] = out""",
    "in an epoch": """if epoch in (1, 2):
                bank[index] = out""",
    "where something else is so": """is_hard = index > 3
            if is_hard.any():
                bank[index] = out""",
    "beside a look": """if len(x) in bank:
                print(len(x))
            bank[index] = out""",
    "where it may fail": """try:
                bank[index] = losses[0]
            except IndexError:
                pass""",
}
NOT_WRITTEN = {
    "by a name": "bank['loss'] = loss",
    "by what the lane has not given": "bank[epoch] = loss",
    "by the names of layers": """for name, one in model.named_parameters():
                bank[name] = one.grad""",
    "by update of a name": "bank.update({'loss': loss, **others})",
    "a copy": "bank.clone()[index] = out",
    "a slice": "bank[: len(x)] = out",
    "a cache": """if len(x) not in bank:
                bank[len(x)] = out""",
    "a cache by get": """known = bank.get(len(x))
            if known is None:
                bank[len(x)] = out""",
    "a cache by an exception": """try:
                known = bank[len(x)]
            except KeyError:
                bank[len(x)] = out""",
    "the lane's own": """bank = {}
            bank[index] = out""",
}


def shown(text: str, tmp_path: Path) -> list[str]:
    path = tmp_path / f"script_{abs(hash(text))}.py"
    path.write_text(text)
    line = next((number for number, one in enumerate(text.splitlines(), 1) if "in run." in one), 0)
    found = [{**one.attributes, **one.variables} for one in (rows_of_lanes(str(path), line), rows_in(str(path)))]
    return [name for one in found for name in one]


@pytest.mark.parametrize("words", WRITTEN.values(), ids=WRITTEN)
def test_rows_that_lanes_write_by_their_index_are_found(words: str, tmp_path: Path) -> None:
    loop = f"""if True:
        bank = Bank()
        for x, index in run.lanes(batch):
            {words}
        """
    assert "bank" in shown(f"{loop}print(bank)", tmp_path)
    assert shown(f"{loop}print(x)", tmp_path) == []


IN_FUNCTIONS = {
    "of an object": ("self.rows", "class Bank:\n    def hardest(self): return self.rows.max()\n"),
    "of the file": ("rows", "rows = {}\ndef show(): print(rows)\n"),
}


@pytest.mark.parametrize(("table", "read"), IN_FUNCTIONS.values(), ids=IN_FUNCTIONS)
def test_rows_that_functions_write_by_an_argument_are_found_where_something_reads_them(
    table: str, read: str, tmp_path: Path
) -> None:
    written = f"def keep(self, index, out):\n    {table}[index] = out\n"
    assert shown(written + read, tmp_path) == ["rows"]
    assert shown(written, tmp_path) == []


def test_rows_by_an_index_of_the_objects_own_are_not(tmp_path: Path) -> None:
    ring = "def keep(self, out):\n    self.rows[self.at] = out\n"
    assert shown(f"{ring}def all(self): return self.rows\n", tmp_path) == []


def test_rows_of_a_functions_own_table_are_not(tmp_path: Path) -> None:
    assert shown("def keep(index, out):\n    rows = {}\n    rows[index] = out\n    return rows\n", tmp_path) == []


@pytest.mark.parametrize("words", NOT_WRITTEN.values(), ids=NOT_WRITTEN)
def test_what_is_no_row_of_the_lanes_is_not(words: str, tmp_path: Path) -> None:
    loop = f"""if True:
        for x, index in run.lanes(batch):
            {words}
        print(bank)
        """
    assert shown(loop, tmp_path) == []


class Bank(nn.Linear):
    """Written by one method, and read by another."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.bank = torch.zeros(8, 2)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        out = super().forward(x) + self.bank[index]
        self.remember(out.detach(), index)
        return out

    def remember(self, out: Tensor, index: Tensor) -> None:
        self.bank.data[index] = out


class Shown(nn.Linear):
    """What a hook keeps is read in the same lane."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.outputs: dict[str, Tensor] = {}
        self.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, _: Any, out: Tensor) -> None:
        self.outputs[type(module).__name__] = out

    def loss(self, y: Tensor) -> Tensor:
        return F.cross_entropy(self.outputs["Shown"], y)


def train(run: Run, model: nn.Module, table: Any, write: Callable[[Any, Tensor, float], None] | None = None) -> None:
    run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        for x, y, index in run.lanes((X + step, Y, INDEX)):
            out = model(x, index) if isinstance(model, Bank) else model(x)
            loss = model.loss(y) if isinstance(model, Shown) else F.cross_entropy(out, y)
            run.backward(loss)
            if write is not None:
                write(table, index, loss.item())


hardness = torch.zeros(8)


def remembered(_: Any, index: Tensor, loss: float) -> None:
    hardness[index] = loss


def harder_ones() -> Tensor:
    return hardness.argsort()


def test_a_bank_in_the_model_is_noted_by_name() -> None:
    (note,) = notes(2, lambda run: train(run, Bank(), None))
    assert "by `self.bank.data[index] = out` (line" in note
    assert "of test_tables.py: a worker writes the rows of its own lanes only" in note
    assert "run.gather(rows)" in note
    assert notes(1, lambda run: train(run, Bank(), None)) == []


def test_a_table_of_the_file_is_too() -> None:
    (note,) = notes(2, lambda run: train(run, nn.Linear(3, 2), None, remembered))
    assert "by `hardness[index] = loss` (line" in note


@pytest.mark.parametrize("make", [lambda: torch.zeros(8), lambda: np.zeros(8), lambda: [0.0] * 8, dict])
def test_a_table_of_the_loop_is_too(make: Callable[[], Any]) -> None:
    def script(run: Run) -> None:
        losses, model = make(), nn.Linear(3, 2)
        run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y, index in run.lanes((X, Y, INDEX)):
            loss = F.cross_entropy(model(x), y, reduction="none")
            run.backward(loss.mean())
            for i, one in zip(index.tolist(), loss.tolist(), strict=True):
                losses[i] = one
        print(losses)

    (note,) = notes(2, script)
    assert "by `losses[i] = one` (line" in note


def test_what_hooks_keep_to_be_read_in_the_lane_is_not() -> None:
    assert notes(2, lambda run: train(run, Shown(), None)) == []


def test_rows_that_are_gathered_are_not() -> None:
    def script(run: Run) -> None:
        model, rows, bank = nn.Linear(3, 2), [], torch.zeros(8, 2)
        run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y, index in run.lanes((X, Y, INDEX)):
            out = model(x) + bank[index]
            run.backward(F.cross_entropy(out, y))
            rows.append((index, out.detach()))
        for index, row in run.gather(rows):
            bank[index] = row

    assert notes(2, script) == []


@pytest.mark.parametrize(
    ("text", "is_written"),
    [
        ("bank[index] = x", True),
        ("self.bank[index][0] += x", True),
        ("bank[\n    rows[index[0]], 1\n] = x", True),
        ("bank.data[index] = x", True),
        ("bank[index].copy_(x)", True),
        ("bank.update({key: x})", True),
        ("y = bank[index]\nx = 2", False),
        ("bank[index] == x", False),
        ("for key in bank.items(): pass", False),
        ("my_bank[index] = x", False),
    ],
)
def test_whether_rows_may_be_written_shows_without_parsing(tmp_path: Path, text: str, is_written: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    assert may_have_rows(str(path), "bank") is is_written
