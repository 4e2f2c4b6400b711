"""`lockstep.launch(fn, ...)`: a function of this process on real workers, and what the first of them returned."""

import io
import linecache
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from launches import FORKING

import lockstep
from lockstep.errors import BadArgument, BadEnvironment, LaunchFailed
from lockstep.launch.function import CellScreen, notebook_cells
from lockstep.launch.pools import process

pytest.importorskip("cloudpickle", reason="lockstep.launch needs cloudpickle: pip install 'torch-lockstep[notebook]'")

CELL = """
import os, signal
import torch
import lockstep
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2

def kill_once(moment):
    if not os.path.exists(moment):
        open(moment, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)

def train(width, deaths=(), bad_step=None):
    run = lockstep.start(lanes=4, seed=1)
    torch.manual_seed(0)
    model = torch.nn.Linear(width, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.replicate(model, optimizer)
    data = TensorDataset(torch.arange(24.0 * width).view(24, width) / 100)
    loader = run.shard(DataLoader(data, batch_size=8, shuffle=True))
    for _ in run.epochs(EPOCHS):
        for batch in loader:
            for (x,) in run.lanes(batch):
                if run.is_first and run.step in deaths:
                    kill_once(f"died-{run.step}")
                if run.step == bad_step:
                    raise ValueError("bad sample 7")
                run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            run.print("step", run.step)
    return {"digest": run.digest(), "weight": model.weight.detach(), "rank": run.rank}

def divides(number):
    return 1 / number

def closes():
    with lockstep.start() as run:
        return run.rank, run.size

def looks(folder):
    made = [*folder.glob("lockstep-call-*"), *folder.glob("lockstep-call-*/*")]
    return {path.name[:8]: path.stat().st_mode & 0o777 for path in made}

def returns_a_lock():
    import threading
    return threading.Lock()
"""
CELL_FILE = "/tmp/ipykernel_7/123.py"


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names of a notebook's cell, in a process that stands in a folder of its own, and whose workers are forked."""
    monkeypatch.setattr(process, "subprocess", FORKING)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setitem(linecache.cache, CELL_FILE, (len(CELL), None, CELL.splitlines(keepends=True), CELL_FILE))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, CELL_FILE, "exec"), names)
    yield names
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_value_is_that_of_the_first_worker_and_the_same_on_any_number(
    cell: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    values = [lockstep.launch(cell["train"], 3, n=n) for n in (1, 2)]
    assert [value["rank"] for value in values] == [0, 0]
    assert values[0]["digest"] == values[1]["digest"]
    assert values[0]["weight"].equal(values[1]["weight"])
    assert capfd.readouterr().out.count("step 6\n") == 2


def test_a_killed_worker_does_not_end_the_call(cell: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    calm = lockstep.launch(cell["train"], 3, n=2)
    disturbed = lockstep.launch(cell["train"], 3, (1, 4), n=3)
    assert sorted(path.name for path in Path().glob("died-*")) == ["died-1", "died-4"]
    assert disturbed["digest"] == calm["digest"]
    assert "was killed by SIGKILL" in capfd.readouterr().err


def test_an_error_names_the_line_of_the_cell(cell: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    line = CELL.splitlines().index('                    raise ValueError("bad sample 7")') + 1
    said = rf"failed at step 2: ValueError: bad sample 7, at 123\.py, line {line} in train"
    with pytest.raises(LaunchFailed, match=said):
        lockstep.launch(cell["train"], 3, (), 2, n=2)
    assert f'123.py, line {line}  in train     raise ValueError("bad sample 7")' in capfd.readouterr().err


def test_a_process_that_is_started_from_nothing_knows_the_text_of_the_cell(
    cell: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "subprocess", subprocess)
    with pytest.raises(LaunchFailed, match=r"ZeroDivisionError.*123\.py, line \d+ in divides"):
        lockstep.launch(cell["divides"], 0)
    assert "in divides     return 1 / number" in capfd.readouterr().err


class Interrupting(io.StringIO):
    """Where the notebook shows output; the user interrupts the kernel as soon as the text is there."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text: str | None = text

    def write(self, shown: str) -> int:
        written = super().write(shown)
        if self._text is not None and self._text in self.getvalue():
            self._text = None
            os.kill(os.getpid(), signal.SIGINT)
        return written


def test_an_interrupt_ends_the_run_in_order_and_it_goes_on_from_there(
    cell: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell["EPOCHS"] = 40
    calm = lockstep.launch(cell["train"], 3, n=2)
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "stdout", Interrupting("step 5\n"))
    with pytest.raises(KeyboardInterrupt):
        lockstep.launch(cell["train"], 3, n=2, run_dir="run")
    saved = [int(path.name.removeprefix("step-")) for path in Path("run/checkpoints").glob("step-*")]
    assert len(saved) == 1
    assert 5 <= saved[0] < 120
    assert signal.getsignal(signal.SIGINT) is before
    goes_on = lockstep.launch(cell["train"], 3, n=3, run_dir="run", resume="auto", checkpoint_every="1000 steps")
    assert goes_on["digest"] == calm["digest"]


def test_only_this_user_can_read_the_files_of_a_call(cell: dict[str, Any]) -> None:
    modes = lockstep.launch(cell["looks"], Path(tempfile.gettempdir()))
    assert modes == {"lockstep": stat.S_IRWXU, "function": stat.S_IRUSR | stat.S_IWUSR}


def test_a_function_that_closes_its_run_gives_its_value_too(cell: dict[str, Any]) -> None:
    assert lockstep.launch(cell["closes"], n=2) == (0, 2)


def test_what_cannot_be_pickled_is_refused_before_and_after(cell: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match="train cannot be sent to the workers: TypeError"):
        lockstep.launch(cell["train"], threading.Lock())
    with pytest.raises(LaunchFailed, match="returns_a_lock has returned what cannot be sent back"):
        lockstep.launch(cell["returns_a_lock"])


def test_workers_that_start_no_run_are_no_success(cell: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchFailed, match=r"looks has not come to its end.*lockstep\.start\(\)"):
        lockstep.launch(cell["looks"], Path("nowhere"), n=2)
    assert "lockstep.start" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: lockstep.launch("train.py"), "takes a function"),
        (lambda: lockstep.launch(print, n=0), "takes n=1 to"),
        (lambda: lockstep.launch(print, n=True), "takes n=1 to"),
        (lambda: lockstep.launch(print, width=3), "has no option width; it has n, run_dir, lanes"),
    ],
)
def test_what_cannot_be_launched_is_refused_with_what_can(call: Callable[[], Any], why: str) -> None:
    with pytest.raises(BadArgument, match=why):
        call()


def test_without_cloudpickle_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(BadEnvironment, match=r"torch-lockstep\[notebook\]"):
        lockstep.launch(print)


def test_another_thread_is_refused() -> None:
    found: list[str] = []

    def call() -> None:
        try:
            lockstep.launch(print)
        except BadEnvironment as error:
            found.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in found[0]


def test_the_room_is_the_function_too() -> None:
    assert isinstance(lockstep.launch, ModuleType)
    assert callable(lockstep.launch)


def test_cells_are_called_as_the_notebook_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linecache.cache, CELL_FILE, (5, None, ["1/0\n"], CELL_FILE))
    here = next(cell for cell in notebook_cells() if cell.file == CELL_FILE)
    out, err = io.StringIO(), io.StringIO()
    screen = CellScreen([here], out, err)
    screen.show(b'  File "/tmp/ipykernel_7/123.py", line 1\nhalf a line, \xe2\x82')
    screen.show(b"\xac")
    screen.say("! lost at /tmp/ipykernel_7/123.py:4")
    assert out.getvalue() == "  123.py, line 1\nhalf a line, €"
    assert err.getvalue() == "\n! lost at 123.py, line 4\n"
