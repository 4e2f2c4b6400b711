"""`lockstep.launch` in a real Jupyter kernel, whose cells are all that there is of the script."""

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import IMPORTABLE

pytestmark = pytest.mark.integrations

reason = "needs a Jupyter kernel: make test-integrations"
nbformat = pytest.importorskip("nbformat", reason=reason)
nbclient = pytest.importorskip("nbclient", reason=reason)
pytest.importorskip("ipykernel", reason=reason)
pytest.importorskip("cloudpickle", reason=reason)
jupyter_client = pytest.importorskip("jupyter_client", reason=reason)

LIMIT_S = 120.0

IMPORTS = """
import os, signal
import torch
import lockstep
from torch.utils.data import DataLoader, TensorDataset
torch.ones(200, 200) @ torch.ones(200, 200)  # torch has been used in the kernel, with its threads
if torch.cuda.is_available():
    torch.ones(3, device="cuda").sum().item()
data = TensorDataset(torch.arange(72.0).view(24, 3) / 50)
"""
TRAIN = """
def train(epochs, deaths=(), bad_step=None):
    run = lockstep.start(lanes=4, seed=1, device="cpu")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.replicate(model, optimizer)
    loader = run.shard(DataLoader(data, batch_size=8, shuffle=True))
    for _ in run.epochs(epochs):
        for batch in loader:
            for (x,) in run.lanes(batch):
                if run.is_first and run.step in deaths and not os.path.exists(f"died-{run.step}"):
                    open(f"died-{run.step}", "x").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                if run.step == bad_step:
                    raise ValueError("bad sample 7")
                run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            run.print("step", run.step)
    return run.digest()
"""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", IMPORTABLE)


def _run(folder: Path, *cells: str) -> list[Any]:
    """The notebook's cells after they have run in a kernel of their own; an error ends none of the others."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=LIMIT_S, kernel_name="python3", allow_errors=True,
        resources={"metadata": {"path": str(folder)}},
    )  # fmt: skip
    return list(client.execute().cells)


def _text(cell: Any, stream: str = "stdout") -> str:
    return "".join(part["text"] for part in cell.outputs if part.get("name") == stream)


def _error(cell: Any) -> Any:
    return next(part for part in cell.outputs if part["output_type"] == "error")


def test_cells_train_on_workers_survive_a_kill_and_name_the_line_of_an_error(tmp_path: Path) -> None:
    _, _, calm, disturbed, equal, failed, after = _run(
        tmp_path,
        IMPORTS,
        TRAIN,
        "calm = lockstep.launch(train, 2, n=1)",
        "disturbed = lockstep.launch(train, 2, (1, 3), n=2)",
        "print(calm == disturbed, len(calm))",
        "lockstep.launch(train, 2, (), 2, n=2)",
        "print('the kernel lives')",
    )
    assert _text(calm).splitlines()[-6:] == [f"step {number}" for number in range(1, 7)]
    assert _text(calm).startswith("lockstep ")
    assert "train · 1 worker · 4 lanes" in _text(calm)
    assert sorted(path.name for path in tmp_path.glob("died-*")) == ["died-1", "died-3"]
    assert "was killed by SIGKILL at step 1" in _text(disturbed, "stderr")
    assert "step 6\n" in _text(disturbed)
    assert _text(equal) == "True 64\n"
    line = TRAIN.strip().splitlines().index('                    raise ValueError("bad sample 7")') + 1
    assert _error(failed)["ename"] == "LaunchFailed"
    assert f"at step 2: ValueError: bad sample 7, at Cell In[2], line {line} in train" in _error(failed)["evalue"]
    assert f'Cell In[2], line {line}  in train     raise ValueError("bad sample 7")' in _text(failed, "stderr")
    assert _text(after) == "the kernel lives\n"


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """A kernel, and a client of it."""
    manager = jupyter_client.KernelManager()
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=LIMIT_S)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()
    manager.context.destroy()


def _execute(client: Any, code: str, on_text: Any = lambda text: None) -> tuple[str, str]:
    """Runs a cell to its end; gives what it showed, and the name of its error or nothing."""
    sent, shown, error = client.execute(code), "", ""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        assert time.monotonic() < deadline_s, shown
        try:
            message = client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        if message["parent_header"].get("msg_id") != sent:
            continue
        content = message["content"]
        if message["msg_type"] == "stream":
            shown += content["text"]
            on_text(shown)
        elif message["msg_type"] == "error":
            error = content["ename"]
        elif message["msg_type"] == "status" and content["execution_state"] == "idle":
            return shown, error


def test_interrupting_the_kernel_ends_the_run_in_order(kernel: tuple[Any, Any], tmp_path: Path) -> None:
    manager, client = kernel
    asked: list[bool] = []

    def interrupt(shown: str) -> None:
        if "step 5\n" in shown and not asked:
            asked.append(True)
            manager.interrupt_kernel()

    for code in (IMPORTS, TRAIN):
        assert _execute(client, code) == ("", "")
    shown, error = _execute(client, "lockstep.launch(train, 100000, n=2, run_dir='run')", interrupt)
    assert error == "KeyboardInterrupt"
    assert "saved as " in shown
    assert "stopped by Ctrl-C; all 2 workers have ended" in shown
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1
    assert _execute(client, "print(lockstep.__version__ != '')") == ("True\n", "")
