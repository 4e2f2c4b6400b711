"""One run after another in the same script."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from launches import launch
from training import Job, data, make
from workers import on_workers, outcomes

import lockstep
from lockstep.errors import BadEnvironment
from lockstep.run import active
from lockstep.run.terms import leave_unless_same


def _train(seed: int, victim: int | None = None) -> str:
    with lockstep.start(lanes=4, seed=seed) as run:
        model, optimizer = make(Job())
        run.replicate(model, optimizer)
        x, y = data()
        for start in (0, 52, 104):
            for inputs, targets in run.lanes((x[start : start + 52], y[start : start + 52])):
                F.cross_entropy(model(inputs), targets).backward()
                if victim is not None and os.environ["RANK"] == str(victim):
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
        return run.digest()


def _two_runs(victim_of_second: int | None = None) -> list[str]:
    return [_train(1), _train(2, victim_of_second)]


def _after_a_loss() -> Any:
    digest = _train(1, victim=1)
    try:
        _train(2)
    except BadEnvironment as error:
        return [digest, str(error)]
    return None


def test_each_run_of_a_script_has_the_bits_it_has_alone() -> None:
    alone = [on_workers(1, _train, seed)[0] for seed in (1, 2)]
    assert on_workers(1, _two_runs) == [alone]
    assert on_workers(3, _two_runs) == [alone] * 3


def _two_saved_runs(folder: str) -> list[tuple[int, str]]:
    """Each saves where the launcher says, and goes on from there."""
    os.environ |= {"LOCKSTEP_CHECKPOINTS": folder, "LOCKSTEP_RESUME": "auto"}
    found = []
    for seed, num_steps in ((1, 2), (2, 3)):
        with lockstep.start(lanes=4, seed=seed) as run:
            model, optimizer = make(Job())
            run.replicate(model, optimizer)
            began_at = run.checkpoints(every_steps=1)
            x, y = data()
            for _ in run.epochs(num_steps):
                for inputs, targets in run.lanes((x[:52], y[:52])):
                    F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append((began_at, run.digest()))
    return found


@pytest.mark.parametrize("workers", [1, 3])
def test_each_run_of_a_script_goes_on_from_its_own_checkpoint(tmp_path: Path, workers: int) -> None:
    first = on_workers(workers, _two_saved_runs, str(tmp_path))[0]
    again = on_workers(workers, _two_saved_runs, str(tmp_path))[0]
    assert [step for step, _ in first] == [0, 0]
    assert all(step > 0 for step, _ in again)  # a save that is under way puts the next one off
    assert [digest for _, digest in again] == [digest for _, digest in first]
    assert {path.name for path in tmp_path.glob("run-*")} == {"run-2"}


TWO_STARTS = """
import lockstep
for number in range(2):
    with lockstep.start(lanes=2, device="cpu") as run:
        run.print("run", number, run.total(1))
"""


def test_a_script_under_the_launcher_may_start_one_run_after_another(tmp_path: Path) -> None:
    with launch(tmp_path, TWO_STARTS, "-n", "2") as run:
        assert run.finish() == 0, run.shown()
    assert "run 0 2" in run.shown()
    assert "run 1 2" in run.shown()


def test_a_worker_lost_in_the_second_run_costs_nothing() -> None:
    undisturbed = on_workers(1, _two_runs)[0]
    lost, *others = sorted(outcomes(3, _two_runs, 1), key=lambda outcome: outcome.killed_by is None)
    assert lost.killed_by == signal.SIGKILL
    assert [outcome.value for outcome in others] == [undisturbed] * 2


def test_after_a_loss_another_run_is_refused_on_all_workers_at_once() -> None:
    undisturbed = on_workers(1, _train, 1)[0]
    _, *others = sorted(outcomes(3, _after_a_loss), key=lambda outcome: outcome.killed_by is None)
    for outcome in others:
        digest, result = outcome.value
        assert digest == undisturbed
        assert "workers have come or gone" in result


def test_a_worker_that_is_alone_may_start_again_after_an_error() -> None:
    try:
        with lockstep.start():
            torch.zeros(1).backward()
    except RuntimeError:
        pass
    with lockstep.start() as run:
        assert run.size == 1


def test_a_worker_that_comes_while_the_others_are_in_a_later_run_leaves_with_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    leave_unless_same(active.num_before())
    with pytest.raises(SystemExit) as left:
        leave_unless_same(active.num_before() + 1)
    assert left.value.code == 0
    assert "a worker cannot join: the others are in run" in capsys.readouterr().err
