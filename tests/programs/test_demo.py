"""`lockstep demo` with real workers, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4
from xml.etree import ElementTree

import pytest
from marked import MARK, survivors

REPOSITORY = Path(__file__).parents[2]


def start(folder: Path, *words: str, mark: str = "demo") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", "demo", *words],
        cwd=folder,
        env={**os.environ, MARK: mark, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_one_and_two_workers_train_the_same_model_and_leave_a_report(tmp_path: Path) -> None:
    out, err = (demo := start(tmp_path, "--steps", "4", "--workers", "1,2", "--json")).communicate(timeout=90)
    assert demo.returncode == 0, err
    found = json.loads(out)
    one, two = found["runs"]
    assert found["equal"]
    assert (one["workers"], two["workers"]) == (1, 2)
    for what in ("digest", "losses", "held_out_loss", "written"):
        assert one[what] == two[what]
    assert len(one["losses"]) == 4
    assert one["losses"][-1] < one["losses"][0]
    assert "step 4/4" in err
    report = tmp_path / "demo-report"
    assert one["digest"] in (report / "report.md").read_text()
    assert "(loss.svg)" in (report / "report.md").read_text()
    assert ElementTree.parse(report / "loss.svg").getroot().tag.endswith("svg")


def test_ctrl_c_ends_the_demo_with_130_and_leaves_no_process(tmp_path: Path) -> None:
    mark = uuid4().hex
    demo = start(tmp_path, "--steps", "100000", "--workers", "2", mark=mark)
    assert demo.stdout is not None
    while "step" not in (line := demo.stdout.readline()):
        assert line, "the demo ended before its first step"
    demo.send_signal(signal.SIGINT)
    out, err = demo.communicate(timeout=30)
    assert demo.returncode == 130
    assert "stopped by Ctrl-C" in out
    assert "Traceback" not in out + err
    assert survivors(mark) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--steps", "0"], "give a whole number, 1 or more"),
        (["--steps", "many"], "give a whole number, 1 or more"),
        (["--workers", "1,two"], 'such as "1,2,3"'),
        (["--workers", ""], 'such as "1,2,3"'),
        (["--workers", "1,1"], "name each number of workers once"),
        (["--workers", "0,1"], "1 to 8 workers"),
        (["--workers", "1,9"], "1 to 8 workers"),
        (["--out", "taken"], "no report can be written to taken"),
    ],
)
def test_unhappy_words_are_refused_with_a_sentence(tmp_path: Path, words: list[str], sentence: str) -> None:
    (tmp_path / "taken").write_text("a file")
    _, err = (demo := start(tmp_path, *words)).communicate(timeout=30)
    assert demo.returncode == 2
    assert sentence in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
