"""`lockstep demo` with real workers, and what it refuses."""

import json
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from launches import start_lockstep
from marked import MARK, survivors


def start(folder: Path, *words: str, mark: str = "demo") -> "subprocess.Popen[str]":
    return start_lockstep("demo", *words, cwd=folder, **{MARK: mark})


@dataclass(frozen=True)
class Ended:
    """A demo on one worker and on two, and with kills, that has come to its end."""

    found: dict[str, Any]
    told: str
    report: Path
    left_running: list[int]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder, mark = tmp_path_factory.mktemp("demo"), uuid4().hex
    demo = start(folder, "--steps", "36", "--workers", "1,2", "--kill", "--json", mark=mark)
    out, err = demo.communicate(timeout=150)
    assert demo.returncode == 0, err
    return Ended(json.loads(out), err, folder / "demo-report", survivors(mark))


def test_one_and_two_workers_train_the_same_model(ended: Ended) -> None:
    one, two = ended.found["runs"]
    assert ended.found["equal"]
    assert (one["workers"], two["workers"]) == (1, 2)
    for what in ("digest", "losses", "held_out_loss", "written"):
        assert one[what] == two[what]
    assert len(one["losses"]) == 36
    assert one["losses"][-1] < one["losses"][0]
    assert "step 36/36" in ended.told


def test_the_demo_leaves_a_page_with_every_run_and_every_kill(ended: Ended) -> None:
    page = (ended.report / "report.html").read_text()
    views = json.loads(page.partition('id="embedded">')[2].partition("</script>")[0])["runs"]
    assert [view["name"] for view in views] == ["workers-1", "workers-2", "with-kills"]
    assert {view["state"] for view in views} == {"finished"}
    assert {view["steps"]["loss"][-1] for view in views} == {ended.found["runs"][0]["final_loss"]}
    lost = [mark for mark in views[-1]["marks"] if mark["kind"] == "lost"]
    assert len(lost) == len(ended.found["disturbed"]["kills"])


def test_a_run_whose_workers_are_killed_trains_the_model_of_the_run_in_peace(ended: Ended) -> None:
    calm, disturbed = ended.found["runs"][1], ended.found["disturbed"]
    assert len(disturbed["kills"]) == 3, ended.told
    assert (disturbed["digest"], disturbed["held_out_loss"]) == (calm["digest"], calm["held_out_loss"])
    assert (disturbed["steps"], disturbed["steps_lost"]) == (36, 0)


def test_a_kill_is_told_when_it_happens_and_so_is_what_follows(ended: Ended) -> None:
    told = ended.told[ended.told.index("kill 1 of 3: ") :]
    victim = told.removeprefix("kill 1 of 3: ").partition(" at step")[0]
    places = [told.index(words) for words in (f"! {victim} was killed by SIGKILL", "the next step was done")]
    assert places == sorted(places)
    assert ended.found["disturbed"]["kills"][0]["pause_s"] > 0


def test_a_demo_with_kills_leaves_no_process(ended: Ended) -> None:
    assert ended.left_running == []


@pytest.mark.parametrize(
    ("words", "awaited"),
    [
        (["--steps", "100000"], "step"),
        pytest.param(["--steps", "60", "--kill"], "kill 1 of 5", marks=pytest.mark.soak),
    ],
    ids=["in peace", "after a kill"],
)
def test_ctrl_c_ends_the_demo_with_130_and_leaves_no_process(tmp_path: Path, words: list[str], awaited: str) -> None:
    mark = uuid4().hex
    demo = start(tmp_path, "--workers", "2", *words, mark=mark)
    assert demo.stdout is not None
    while awaited not in (line := demo.stdout.readline()):
        assert line, f"the demo ended before {awaited!r}"
    demo.send_signal(signal.SIGINT)
    out, err = demo.communicate(timeout=90)
    assert demo.returncode == 130
    assert "stopped by Ctrl-C" in out
    assert "Traceback" not in out + err
    assert survivors(mark) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--steps", "0"], "give a whole number, 1 or more"),
        (["--steps", "many"], "give a whole number, 1 or more"),
        (["--workers", "1,two"], "write 1,2,3 or 1-4"),
        (["--workers", ""], "write 1,2,3 or 1-4"),
        (["--workers", "0,1"], "write 1,2,3 or 1-4"),
        (["--workers", "1,9"], "1 to 8 workers"),
        (["--workers", "1", "--kill"], "--kill needs a run on 2 workers or more"),
        (["--steps", "11", "--kill"], "--kill needs 12 steps or more"),
        (["--out", "taken"], "no report can be written to taken"),
    ],
)
def test_unhappy_words_are_refused_with_a_sentence(tmp_path: Path, words: list[str], sentence: str) -> None:
    (tmp_path / "taken").write_text("a file")
    _, err = (demo := start(tmp_path, *words)).communicate(timeout=90)
    assert demo.returncode == 2
    assert sentence in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
