"""`lockstep finished`: an exit code made of another."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.cli.finished import command
from lockstep.observe.finish import FILE


@pytest.mark.parametrize(("code", "found"), [("0", 0), ("137", 0), ("75", 0), ("1", 1), ("143", 143)])
def test_a_run_that_has_come_to_its_end_makes_the_code_of_a_lost_worker_good(
    code: str, found: int, tmp_path: Path
) -> None:
    (tmp_path / FILE).write_text('{"step": 48, "num_workers": 2}')
    assert CliRunner().invoke(command, [str(tmp_path), "--code", code]).exit_code == found


def test_a_run_that_has_not_come_to_its_end_is_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "run-7"
    assert f"there is no folder {run_dir}" in CliRunner().invoke(command, [str(run_dir)]).output
    run_dir.mkdir()
    result = CliRunner().invoke(command, [str(run_dir)])
    assert result.exit_code == 1
    assert "run-7 has not come to its end" in result.output


def test_a_code_that_is_none_is_refused(tmp_path: Path) -> None:
    assert CliRunner().invoke(command, [str(tmp_path), "--code", "x"]).exit_code == 2
