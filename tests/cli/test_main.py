"""What holds for every command."""

import signal
from pathlib import Path

import pytest
from launches import finish, start_lockstep


@pytest.mark.parametrize(
    ("words", "code"), [(("--version",), 0), ((), 2), (("nothing",), 2), (("run",), 2), (("run", "--help"), 0)]
)
def test_exit_codes_are_those_of_a_command_line(tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    assert finish(start_lockstep(*words, cwd=tmp_path))[0] == code


def test_ctrl_c_ends_a_command_with_130_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, time\nopen('there', 'w').close()\ntime.sleep(60)\n")
    command = start_lockstep("verify", "--workers", "1,2", "train.py", cwd=tmp_path)
    while not (tmp_path / "there").exists():
        assert command.poll() is None
    command.send_signal(signal.SIGINT)
    code, _, errors = finish(command)
    assert code == 130
    assert "Traceback" not in errors
    assert "Aborted" not in errors
