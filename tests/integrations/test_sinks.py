"""`run.log_to` with the loggers that people have: TensorBoard, Weights & Biases without a network, MLflow."""

from pathlib import Path

import pytest
from launches import launch

pytestmark = pytest.mark.integrations

SCRIPT = """
import os, signal
import torch
import lockstep
from torch.utils.data import DataLoader, TensorDataset
IMPORTS

run = lockstep.start(lanes=4, seed=1, device="cpu")
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.replicate(model, optimizer)
loader = run.shard(DataLoader(TensorDataset(torch.arange(72.0).view(24, 3) / 50), batch_size=8, shuffle=True))
run.log_to(SINK)
for _ in run.epochs(3):
    for batch in loader:
        for (x,) in run.lanes(batch):
            if run.is_first and run.step in DEATHS and not os.path.exists(f"died-{run.step}"):
                open(f"died-{run.step}", "x").close()
                os.kill(os.getpid(), signal.SIGKILL)
            run.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        run.log({"loss": run.loss})
"""


def _train(folder: Path, imports: str, sink: str, deaths: tuple[int, ...] = (), **variables: str) -> str:
    """Nine steps on three workers; gives what was shown."""
    script = SCRIPT.replace("IMPORTS", imports).replace("SINK", sink).replace("DEATHS", str(deaths))
    with launch(folder, script, "-n", "3", **variables) as run:
        assert run.finish() == 0, run.shown()
    assert len(list(folder.glob("died-*"))) == len(deaths)
    assert "could not be written" not in run.shown()
    return run.shown()


def test_tensorboard_has_every_step_once_although_the_workers_that_wrote_were_killed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard: make test-integrations")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _train(
        tmp_path, "from torch.utils.tensorboard import SummaryWriter", "lambda: SummaryWriter('board')", deaths=(2, 5)
    )
    boards = [EventAccumulator(str(file)).Reload() for file in (tmp_path / "board").iterdir()]
    assert len(boards) == 3  # one of each worker that was the first
    steps = [event.step for board in boards for event in board.Scalars("loss")]
    assert sorted(steps) == list(range(1, 10))


def test_weights_and_biases_gets_one_run_from_one_worker(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs wandb: make test-integrations")
    shown = _train(tmp_path, "import wandb", "lambda: wandb.init(mode='offline', project='lockstep')")
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
    assert "Run summary" in shown  # it was finished: what it was given is on disk


def test_mlflow_has_every_step_once(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs MLflow: make test-integrations")
    store = tmp_path / "mlruns"
    _train(tmp_path, "import mlflow", "mlflow", MLFLOW_TRACKING_URI=store.as_uri(), MLFLOW_ALLOW_FILE_STORE="true")
    (written,) = store.glob("*/*/metrics/loss")
    assert [int(line.split()[2]) for line in written.read_text().splitlines()] == list(range(1, 10))
