"""A disk that is full, under the logs or under the output itself, with real launches."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launches import Forked, start_lockstep

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests")))}
pytestmark = pytest.mark.timeout(60)

# Launches train.py with its logs on a small disk, which is gone afterwards, and tells what came of it.
ON_A_SMALL_DISK = """
import json, subprocess, sys
from pathlib import Path
from disks import small_disk
folder, is_full, *options = sys.argv[1:]
why = small_disk(folder)
if is_full == "full":
    try: Path(folder, "ballast").write_bytes(bytes(2**17))
    except OSError: pass
launched = [sys.executable, "-m", "lockstep", "run", "--run-dir", folder, *options, "train.py"]
done = subprocess.run(launched, capture_output=True, text=True)
log = Path(folder, "worker-0.log").read_text()
print(json.dumps([why, done.returncode, done.stdout, done.stderr, log]))
"""


@dataclass(frozen=True)
class Launched:
    why: str
    code: int
    out: str
    err: str
    log: str


def on_a_small_disk(folder: Path, script: str, *options: str, is_full: bool = False) -> Launched:
    (folder / "train.py").write_text(script)
    (folder / "small").mkdir()
    words = [str(folder / "small"), "full" if is_full else "empty", *options]
    done = subprocess.run(
        [sys.executable, "-c", ON_A_SMALL_DISK, *words],
        cwd=folder, env=ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Launched(*json.loads(done.stdout))


def test_logs_that_find_no_room_are_told_once_and_go_on_when_there_is_room_and_the_screen_has_everything(tmp_path):
    script = """
import array, fcntl, os, termios
log = os.path.join(os.environ["LOCKSTEP_RUN_DIR"], "worker-0.log")
for number in range(2000):
    print(number, "x" * 70)
left = array.array("i", [1])
while left[0]: fcntl.ioctl(1, termios.FIONREAD, left)  # the launcher has read it all
os.truncate(log, 0)
print("there is room again")
"""
    launched = on_a_small_disk(tmp_path, script, "--torch-distributed")
    shown = launched.out.splitlines()
    assert launched.code == 0
    assert [line.split()[0] for line in shown[:-1]] == [str(number) for number in range(2000)]
    assert launched.err.lstrip("\n") == (
        f"! the logs in {tmp_path / 'small'} cannot be written: {launched.why}. Training goes on, and its output "
        "still comes to the screen; the logs go on when they can\n"
    )
    assert launched.log.endswith("some output is missing: there was no room for it ---\nthere is room again\n")


def test_on_a_disk_that_is_full_from_the_start_a_run_runs_and_its_failure_is_told_with_its_line(tmp_path):
    script = """
import os
if os.environ["LOCKSTEP_RANK"] == "1": raise ValueError("bad sample " + "7" * 9999)
import signal; signal.pause()
"""
    launched = on_a_small_disk(tmp_path, script, "-n", "2", is_full=True)
    if launched.why != "No space left on device":
        pytest.skip("mounting is not allowed here, and a limit on files does not fill a disk")
    first, *story = launched.err.splitlines()
    assert launched.code == 1
    assert first == (
        f"! nothing can be written in {tmp_path / 'small'}: No space left on device. The run goes on; `lockstep scale` "
        "does not reach it"
    )
    assert "Traceback" not in launched.err
    failed = next(line for line in story if line.startswith("✗"))
    assert failed.startswith("✗ worker 1 failed: ValueError: bad sample 777")
    assert 'train.py:3  in <module>     if os.environ["LOCKSTEP_RANK"] == "1"' in launched.err


def test_a_worker_tells_once_that_the_disk_under_its_folder_is_full(tmp_path):
    script = """
import lockstep, torch
run = lockstep.start(lanes=2)
model = run.replicate(torch.nn.Linear(2, 1))
for _ in run.epochs(3):
    for x in run.lanes(torch.ones(4, 2)):
        model(x).mean().backward()
run.print("at step", run.step)
"""
    launched = on_a_small_disk(tmp_path, script, is_full=True)
    if launched.why != "No space left on device":
        pytest.skip("mounting is not allowed here, and a limit on files does not fill a disk")
    assert launched.code == 0
    assert "at step 3" in launched.out
    notes = [line for line in launched.out.splitlines() if "cannot be written" in line]
    assert len(notes) == 1, launched.out
    assert "the history of the run cannot be written" in notes[0]


def with_full_output(*words: str, folder: Path, popen: Any = Forked, **variables: str) -> tuple[int, str]:
    with open("/dev/full", "w") as full:
        ended = start_lockstep(*words, cwd=folder, popen=popen, stdout=full, **variables)
    _, err = ended.communicate(timeout=60)
    return ended.returncode, err


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("run", "--help")])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_sentence_and_exit_code_3(tmp_path, words, unbuffered):
    result = with_full_output(*words, folder=tmp_path, popen=subprocess.Popen, PYTHONUNBUFFERED=unbuffered)
    assert result == (3, "✗ the output cannot be written: No space left on device\n")


def test_a_report_that_cannot_be_written_is_one_sentence_and_exit_code_3(tmp_path):
    result = with_full_output("explain", "allreduce", "--json", folder=tmp_path)
    assert result == (3, "✗ the output cannot be written: No space left on device\n")


def test_a_run_whose_output_cannot_be_written_ends_its_workers_in_order(tmp_path):
    script = """
import os, signal, sys
def end(*_):
    open("ended", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
sys.stdout.write("hello\\n")
signal.pause()
"""
    (tmp_path / "train.py").write_text(script)
    assert with_full_output("run", "train.py", folder=tmp_path) == (
        3,
        "✗ the output cannot be written: No space left on device; the worker has ended. Logs: runs/train-1\n",
    )
    assert (tmp_path / "ended").exists()
    assert (tmp_path / "runs/train-1/worker-0.log").read_text() == "hello\n"
