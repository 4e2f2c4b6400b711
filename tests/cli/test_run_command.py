"""What `lockstep run` makes of its words, without starting anything."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.cli import run as cli
from lockstep.cli import verify
from lockstep.errors import BadEnvironment
from lockstep.launch.launch import Job, LaunchOutcome
from lockstep.settings.environment import STRATEGIES

REPOSITORY = Path(__file__).parents[2]
TYPED = [
    ["-n", "4", "train.py"],
    ["-n", "2", "--lanes", "8", "--seed", "7", "--threads", "2", "--device", "cpu", "--strategy", "replicated",
     "--assignment", "0,1;2,3,4,5,6,7", "--spares", "1", "--fault-budget", "3", "--hang-s", "60",
     "--checkpoints", "my checkpoints",
     "--checkpoint-every", "100 steps", "--checkpoint-keep", "2", "--torch-distributed", "-m", "package.train",
     "--name", "it's mine", "-n", "5"],
]  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Job]:
    """The jobs that would have been launched. Each is interrupted, and saved."""
    jobs: list[Job] = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "package").mkdir()
    monkeypatch.setattr(cli, "launch", lambda job, **_: jobs.append(job) or LaunchOutcome(130, None, 1.0, saved=True))
    return jobs


@pytest.mark.parametrize("typed", TYPED)
def test_the_command_that_goes_on_starts_the_same_job_in_the_same_folder_from_its_checkpoint(launched, typed):
    result = CliRunner().invoke(cli.command, typed)
    line = result.stderr.strip()
    assert line.startswith("to go on: lockstep run ")
    words = shlex.split(line.removeprefix("to go on: lockstep run "))
    assert CliRunner().invoke(cli.command, words).exit_code == 130
    first, second = launched
    assert second.resume == "auto"
    assert first.resume is None
    assert {**vars(first), "resume": "auto"} == vars(second)


def test_where_nothing_was_saved_no_command_is_told(launched, monkeypatch):
    monkeypatch.setattr(cli, "launch", lambda job, **_: LaunchOutcome(130, None, 1.0))
    assert CliRunner().invoke(cli.command, ["train.py"]).stderr == ""


def test_verify_notes_it_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("lockstep.programs.verification.report.present", lambda request, as_json: 0)
    assert "note: -n stands after train.py" in CliRunner().invoke(verify.command, ["train.py", "-n", "3"]).stderr
    assert "note" not in CliRunner().invoke(verify.command, ["-n", "3", "train.py"]).stderr


@pytest.mark.parametrize("found", ["-n", "-n3", "--workers=3"])
def test_a_number_of_workers_after_the_program_is_noted_unless_there_is_one_before_it(launched, found):
    note = f"  note: {found} stands after train.py, so it is the program's own."
    assert note in CliRunner().invoke(cli.command, ["train.py", found, "3"]).stderr
    assert "note" not in CliRunner().invoke(cli.command, ["-n", "2", "train.py", found, "3"]).stderr
    assert "note" not in CliRunner().invoke(cli.command, ["train.py", "--num", "3"]).stderr


def test_a_strategy_that_does_not_exist_is_refused_with_those_that_do_before_anything_is_launched(launched):
    refused = CliRunner().invoke(cli.command, ["--strategy", "local:8", "train.py"])
    assert refused.exit_code == 2
    allowed = " or ".join(map(repr, STRATEGIES))
    assert f"Invalid value for '--strategy': must be {allowed}, not 'local:8'" in refused.stderr
    assert launched == []


def test_a_strategy_is_passed_on_to_the_workers_and_stands_in_the_command_that_goes_on(launched):
    result = CliRunner().invoke(cli.command, ["--strategy", "replicated", "train.py"])
    assert launched[0].variables_of_all({})["LOCKSTEP_STRATEGY"] == "replicated"
    assert " --strategy replicated " in result.stderr


def test_a_folder_of_checkpoints_is_no_checkpoint(launched):
    Path("saved/step-00000004").mkdir(parents=True)
    refused = CliRunner().invoke(cli.command, ["--resume", "saved", "train.py"])
    assert refused.exit_code == 2
    said = " ".join(refused.stderr.split())
    assert "name one of them, such as saved/step-00000004, or write --checkpoints saved --resume auto" in said
    assert CliRunner().invoke(cli.command, ["--resume", "saved/step-00000004", "train.py"]).exit_code == 130


def test_a_fault_that_waits_for_a_copy_is_refused_without_copies(launched, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_FAULT", "kill 1 at 3")
    refused = CliRunner().invoke(cli.command, ["--no-copies", "train.py"])
    assert 'write "replace 1 at 3"' in str(refused.exception)
    assert launched == []
    monkeypatch.setenv("LOCKSTEP_FAULT", "replace 1 at 3")
    CliRunner().invoke(cli.command, ["--no-copies", "train.py"])
    assert len(launched) == 1


HUGE = "9" * 5000


@pytest.mark.parametrize(
    "words",
    [
        ("run", "-n", HUGE, "train.py"),
        ("run", "--lanes", HUGE, "train.py"),
        ("run", "--lanes", "2000000", "train.py"),
        ("run", "--seed", HUGE, "train.py"),
        ("run", "--threads", "1000000000000", "train.py"),
        ("run", "--assignment", f"0;{HUGE}", "train.py"),
        ("run", "--checkpoint-every", f"{HUGE} steps", "train.py"),
        ("run", "--hang-s", "0", "train.py"),
        ("run", "--run-dir", "", "train.py"),
        ("run", "--checkpoints", "", "train.py"),
        ("verify", "--run-dir", "", "train.py"),
        ("run", "--hang-s", "soon", "train.py"),
        ("demo", "--workers", HUGE),
        ("explain", "allreduce", "--hosts", HUGE),
        ("bench", "allreduce", "--sizes", f"{HUGE}KiB"),
        ("bench", "allreduce", "--sizes", "900GiB"),
        ("scale", "runs/x", HUGE),
        ("doctor", "--runs", "train.py"),
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_a_number_or_a_name_that_cannot_be_used_is_refused_by_a_sentence_and_exit_code_2(tmp_path, words):
    (tmp_path / "train.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr[-300:]
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < 600


def test_options_of_a_cluster_are_refused_without_one_and_what_a_cluster_has_not_is_refused_with_it(launched):
    refused = {
        ("--address", "10.0.0.1:6379", "train.py"): "give --on ray too",
        ("--cpus-per-worker", "2", "train.py"): "give --on ray too",
        ("--on", "ray", "--spares", "1", "train.py"): "--spares cannot be had with --on ray",
        ("--on", "ray", "--load-once", "train.py"): "--load-once cannot be had with --on ray",
        ("--on", "ray", "--gpus-per-worker", "-1", "train.py"): "give a number, 0 or more",
    }
    for words, sentence in refused.items():
        result = CliRunner().invoke(cli.command, words)
        assert sentence in f"{result.stderr}{result.exception}", words
    assert launched == []


def test_a_cluster_without_ray_is_a_sentence_that_names_the_extra(launched, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "lockstep.launch.pools.ray_pool", raising=False)
    monkeypatch.delitem(sys.modules, "lockstep.launch.pools.ray_cluster", raising=False)
    result = CliRunner().invoke(cli.command, ["--on", "ray", "train.py"])
    assert isinstance(result.exception, BadEnvironment)
    assert "pip install 'torch-lockstep[ray]'" in str(result.exception)


def test_the_command_that_goes_on_names_the_cluster_and_what_each_worker_needs_of_it(launched, monkeypatch):
    monkeypatch.setattr(cli, "pool_on", lambda engine: None)
    typed = [
        "--on",
        "ray",
        "--address",
        "10.0.0.1:6379",
        "--cpus-per-worker",
        "0.5",
        "--placement",
        "spread",
        "train.py",
    ]
    assert "lockstep run " + shlex.join(typed[:-1]) in CliRunner().invoke(cli.command, typed).stderr
