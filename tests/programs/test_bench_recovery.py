"""The recovery benchmark with real workers and real kills. Times are looked at, never judged."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from uuid import uuid4

import pytest
from click.testing import CliRunner
from marked import MARK, survivors
from workers import on_workers

from lockstep.cli.bench import command
from lockstep.launch.host.orphans import OrphanGuard
from lockstep.launch.host.signals import LauncherSignals
from lockstep.programs.bench.launch import BenchStopped
from lockstep.programs.bench.recovery.log import TrainingResult, TrainingTask, shut_gate
from lockstep.programs.bench.recovery.plan import (
    SIDES,
    SPARE,
    SURVIVORS,
    PlannedKill,
    RecoveryPlan,
    RecoverySide,
    RecoveryTimes,
)
from lockstep.programs.bench.recovery.trial import LauncherProcess, SignalWatch, Trials
from lockstep.programs.bench.recovery.worker import main

REPOSITORY = Path(__file__).parents[2]
PLAN = RecoveryPlan("mlp", workers=2, lanes=4, kills=1, baseline=False)
STEPS = 16

# A launcher that dies of SIGTERM without a thought for its child, which leads a session of its own.
CARELESS = """
import subprocess, sys, time
subprocess.Popen(["sleep", "600"], start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""


def check(recovery: RecoveryTimes | None) -> None:
    assert recovery is not None
    assert math.isfinite(recovery.next_s)
    assert recovery.next_s > 0
    assert recovery.whole_s is None or recovery.whole_s >= recovery.next_s
    assert recovery.steps_lost == 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the whole training on one worker that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with shut_gate(folder) as open_gate, pytest.MonkeyPatch.context() as patch:
        open_gate()
        patch.setenv("LOCKSTEP_LANES", str(PLAN.lanes))
        on_workers(1, main, TrainingTask(PLAN.model, STEPS, str(folder)))
    return TrainingResult.find(folder).digest


@pytest.mark.parametrize(("side", "victim"), [(SURVIVORS, 0), (SPARE, 1)])
@pytest.mark.soak
def test_a_kill_is_timed_and_changes_no_bit(side: RecoverySide, victim: int, undisturbed: str, tmp_path: Path) -> None:
    with LauncherSignals() as signals, OrphanGuard() as guard:
        trials = Trials(PLAN, tmp_path, SignalWatch(signals), guard, dict(os.environ))
        trial = trials.run(side, STEPS, PlannedKill(victim, step=3, fraction=0.5))
    check(trial.recovery)
    assert trial.training.digest == undisturbed


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_short_benchmark_reports_every_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    words = ["recovery", "-n", "2", "--kills", "1", "--json"]
    ended = CliRunner().invoke(command, words, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    report = json.loads(ended.stdout)
    assert [row["side"] for row in report["rows"]] == [side.name for side in SIDES]
    assert all(row["next_median_s"] > 0 and row["restart_ratio"] > 0 for row in report["rows"])
    assert [row["steps_lost"] for row in report["rows"][:2]] == [0, 0]
    assert [claim["side"] for claim in report["claims"]] == ["survivors", "spare"]
    assert report["baseline_bits_agree"] is True  # of two workers: a sum of two numbers has one order only
    assert {"cores", "cpu", "torch", "threads_per_worker"} <= report["machine"].keys()
    assert not list(tmp_path.iterdir()), "the benchmark left its folder behind"


@pytest.mark.soak
def test_ctrl_c_ends_the_benchmark_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    mark = uuid4().hex
    bench = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "bench", "recovery", "-n", "2", "--no-baseline"],
        cwd=tmp_path,
        env={**os.environ, MARK: mark, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert bench.stderr is not None
    assert "undisturbed" in bench.stderr.readline()
    bench.send_signal(signal.SIGINT)
    out, err = bench.communicate(timeout=90)
    assert (bench.returncode, out, err) == (130, "", "✗ stopped; all workers have ended\n")
    assert survivors(mark) == []
    assert not list(tmp_path.iterdir())


def test_what_a_careless_launcher_leaves_is_ended_too(tmp_path: Path) -> None:
    output, mark = tmp_path / "output.log", uuid4().hex
    with LauncherSignals() as signals, OrphanGuard() as guard:
        with LauncherProcess([sys.executable, "-c", CARELESS], {**os.environ, MARK: mark}, output, guard):
            SignalWatch(signals).until(lambda: "started" in output.read_text(), 30, "the child")
            assert len(survivors(mark)) == 2
        assert survivors(mark) == []


def test_waiting_too_long_ends_the_benchmark_with_what_was_waited_for() -> None:
    with LauncherSignals() as signals, pytest.raises(BenchStopped, match="the spare did not come within 0 s"):
        SignalWatch(signals).until(lambda: False, 0.0, "the spare")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "resnet"], "'mlp', 'wide', 'gpt', 'cnn'"),
        (["-n", "1"], "a whole number, 2 or more"),
        (["--kills", "0"], "a whole number, 1 or more"),
        (["--lanes", "none"], "a whole number, 1 or more"),
    ],
)
def test_a_wrong_word_of_recovery_is_refused_with_what_is_allowed(words: list[str], sentence: str) -> None:
    ended = CliRunner().invoke(command, ["recovery", *words], terminal_width=200)
    assert ended.exit_code == 2
    assert sentence in " ".join(ended.output.split())
