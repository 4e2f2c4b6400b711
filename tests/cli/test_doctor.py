"""`lockstep doctor` on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launches import FORKING, start_lockstep

from lockstep.programs.doctor import checkpoint_trial
from lockstep.programs.doctor.checks import CHECKS

COMMAND = "from lockstep.cli.main import main; import sys; sys.argv[0] = 'lockstep'; main()"


def doctor(*words: str, code: str = COMMAND, **environ: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code, "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environ)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> "tuple[Path, subprocess.CompletedProcess[str]]":
    """A folder in which a run was killed, and what is told of it where the command cannot import torch, nor anybody
    safetensors."""
    folder, half = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("half")
    (folder / "train-1").mkdir()
    (folder / "train-1" / "launcher.json").write_text('{"pid": 1, "start_time": -1}')
    (half / "safetensors").mkdir()
    (half / "safetensors" / "__init__.py").write_text("raise ImportError('half an installation')")
    code, path = "import sys; sys.modules['torch'] = None; " + COMMAND, os.pathsep.join((str(half), *sys.path))
    return folder, doctor("-n", "1", "--runs", str(folder), code=code, PYTHONPATH=path)


def test_it_answers_on_this_machine_with_one_line_for_each_check_and_without_torch(told) -> None:
    _, ended = told
    assert ended.returncode == 3, ended.stderr
    marked = [line for line in ended.stdout.splitlines() if line[0] in "✓?!✗"]
    assert len(marked) == len(CHECKS)


def test_a_run_that_was_killed_is_found_in_the_folder_that_is_named(told) -> None:
    folder, ended = told
    assert f"rm {folder}/train-1/launcher.json" in ended.stdout


def test_json_is_one_object_whose_problems_are_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_trial, "subprocess", FORKING)
    forked = start_lockstep("doctor", "-n", "100000", "--json", "--runs", str(tmp_path), cwd=tmp_path)
    out, _ = forked.communicate(timeout=60)
    told = json.loads(out)
    assert (told["workers"], len(told["findings"])) == (100000, len(CHECKS))
    assert told["problems"] > 0
    assert forked.returncode == 3


def test_an_installation_that_cannot_save_is_a_problem(told) -> None:
    _, ended = told
    assert ended.returncode == 3
    assert "a checkpoint cannot be saved and loaded: ImportError: half an installation" in ended.stdout


def test_no_workers_are_refused() -> None:
    ended = doctor("-n", "0")
    assert ended.returncode == 2
    assert "1 or more" in ended.stderr
