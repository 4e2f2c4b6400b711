"""A worker lost in an evaluation: all start again from before it, and what is repeated shows the same."""

import re
from pathlib import Path

import pytest
from launched import died, dying, launched_script, result_of
from workers import on_workers

EPOCHS = 3

SCRIPT = """
import torch
import torch.nn.functional as F
from training import Job, loader_of, make, train_step

run = lockstep.start(lanes=8, seed=3)
job = Job(model="conv")
model, optimizer = make(job)
run.replicate(model, optimizer)
loader, held_out = run.shard(loader_of(job)), run.shard(loader_of(Job(batch=40)))
for epoch in run.epochs(3):
    for batch in loader:
        train_step(run, job, model, optimizer, batch)
    model.eval()
    right, losses = 0, []
    with torch.no_grad():
        for batch in held_out:
            for x, y in run.lanes(batch):
                reach("lane", epoch, run.rank, len(losses))
                scores = model(x)
                right += int((scores.argmax(1) == y).sum())
                losses.append(float(F.cross_entropy(scores, y, reduction="sum")))
    model.train()
    reach("total", epoch, run.rank)
    right = run.total(right)
    reach("second total", epoch, run.rank)
    run.print("epoch", epoch, "right", right, "loss", run.total(losses), flush=True)
run.print("digest", run.digest(), run.step, flush=True)
"""


def _evaluations(shown: str) -> list[str]:
    return re.findall(r"^epoch \d+ right \d+ loss .*$", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("num_workers", "deaths"),
    [
        (2, [("total", 1, 1)]),
        pytest.param(3, [("total", 1, 0)], marks=pytest.mark.soak),
        pytest.param(3, [("lane", 1, 0, 3), ("second total", 2, 2)], marks=pytest.mark.soak),
        pytest.param(3, [("total", 0, 0), ("total", 0, 1)], marks=pytest.mark.soak),
        pytest.param(3, [("lane", 0, 2, 0), ("lane", 1, 2, 0), ("lane", 2, 2, 0)], marks=pytest.mark.soak),
    ],
)
def test_a_run_that_has_lost_a_worker_in_an_evaluation_shows_what_it_would_have_shown(
    tmp_path: Path, num_workers: int, deaths: list[tuple[object, ...]], capfd: pytest.CaptureFixture[str]
) -> None:
    undisturbed = on_workers(1, result_of, dying(SCRIPT, tmp_path, ()))[0]
    evaluations = _evaluations(capfd.readouterr().out)
    assert len(evaluations) == EPOCHS
    with launched_script(tmp_path, dying(SCRIPT, tmp_path, deaths), "-n", str(num_workers)) as run:
        assert list(run.finish()) == undisturbed
        run.wait_for("going on from step-", after=run.wait_for("start again"))
        assert list(dict.fromkeys(_evaluations(run.shown()))) == evaluations
    assert died(tmp_path) == len(deaths)


@pytest.mark.soak
def test_where_both_are_lost_that_keep_a_snapshot_the_run_starts_from_its_beginning(tmp_path: Path) -> None:
    undisturbed = on_workers(1, result_of, dying(SCRIPT, tmp_path, ()))[0]
    deaths = [("total", 1, 0), ("total", 1, 2)]
    with launched_script(tmp_path, dying(SCRIPT, tmp_path, deaths), "-n", "3") as run:
        assert list(run.finish()) == undisturbed
        assert "the run starts from the beginning" in run.shown()
