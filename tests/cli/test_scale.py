"""`lockstep scale` where there is nothing to scale. What it does to a run is in tests/launch/test_supervisor.py."""

import json
import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.cli.scale import command
from lockstep.errors import BadArgument
from lockstep.launch.host.signals import SCALE
from lockstep.launch.scale import ask_for, find_launcher, read_wanted, registered


def test_a_number_that_is_none_is_refused(tmp_path):
    done = CliRunner().invoke(command, [str(tmp_path), "none"])
    assert done.exit_code == 2
    assert "a whole number, 1 or more" in done.output


def test_a_folder_that_does_not_exist_is_no_run(tmp_path):
    with pytest.raises(BadArgument, match="there is no run in"):
        ask_for(tmp_path / "train-1", 2)


def test_a_folder_without_a_launcher_is_not_running(tmp_path):
    with pytest.raises(BadArgument, match="is not running any more, or never was"):
        ask_for(tmp_path, 2)


def test_more_workers_than_a_host_may_run_are_refused(tmp_path):
    with pytest.raises(BadArgument, match="ask for 1 to 1024"):
        ask_for(tmp_path, 1025)


@pytest.mark.parametrize("card", ["", "{", "[]", "{}", '{"pid": "x", "start_time": 1}'])
def test_a_damaged_card_names_no_launcher(tmp_path, card):
    (tmp_path / "launcher.json").write_text(card)
    assert find_launcher(tmp_path) is None


def test_a_process_that_has_the_number_of_a_dead_launcher_is_not_taken_for_it(tmp_path):
    (tmp_path / "launcher.json").write_text(json.dumps({"pid": os.getpid(), "start_time": 1}))
    with pytest.raises(BadArgument, match="is not running any more"):
        ask_for(tmp_path, 2)
    assert read_wanted(tmp_path) is None


def test_the_launcher_is_found_while_it_runs_and_not_after(tmp_path):
    with registered(tmp_path, print):
        assert find_launcher(tmp_path) == os.getpid()
    assert find_launcher(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_the_launcher_is_woken_and_reads_the_number(tmp_path: Path) -> None:
    woken: list[int] = []
    before = signal.signal(SCALE, lambda signum, frame: woken.append(signum))
    try:
        with registered(tmp_path, print):
            ask_for(tmp_path, 5)
        assert (woken, read_wanted(tmp_path)) == ([SCALE], 5)
    finally:
        signal.signal(SCALE, before)


@pytest.mark.parametrize("text", ["", "0", "-1", "many", "1025", "²"])
def test_a_wanted_number_that_makes_no_sense_is_not_read(tmp_path, text):
    (tmp_path / "wanted").write_text(text)
    assert read_wanted(tmp_path) is None
