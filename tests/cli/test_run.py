"""What `lockstep run` makes of its words, without starting anything."""

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.cli import run as cli
from lockstep.run.launching.launch import Job, Outcome

TYPED = [
    ["-n", "4", "train.py"],
    ["-n", "2", "--lanes", "8", "--seed", "7", "--threads", "2", "--device", "cpu", "--assignment", "0,1;2,3,4,5,6,7",
     "--spares", "1", "--fault-budget", "3", "--hang-s", "60", "--checkpoints", "my checkpoints",
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
    monkeypatch.setattr(cli, "launch", lambda job, **_: jobs.append(job) or Outcome(130, None, 1.0, saved=True))
    return jobs


@pytest.mark.parametrize("typed", TYPED)
def test_the_command_that_goes_on_starts_the_same_job_in_the_same_folder_from_its_checkpoint(launched, typed):
    told = CliRunner().invoke(cli.command, typed)
    line = told.stderr.strip()
    assert line.startswith("to go on: lockstep run ")
    words = shlex.split(line.removeprefix("to go on: lockstep run "))
    assert CliRunner().invoke(cli.command, words).exit_code == 130
    first, second = launched
    assert second.resume == "auto"
    assert first.resume is None
    assert {**vars(first), "resume": "auto"} == vars(second)


def test_where_nothing_was_saved_no_command_is_told(launched, monkeypatch):
    monkeypatch.setattr(cli, "launch", lambda job, **_: Outcome(130, None, 1.0))
    assert CliRunner().invoke(cli.command, ["train.py"]).stderr == ""
