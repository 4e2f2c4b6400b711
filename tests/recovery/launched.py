"""A real run under `lockstep run`, disturbed from outside: signals to its workers, `lockstep scale`, Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
from launches import REPOSITORY, Forked, end_launch, start_lockstep

from lockstep.launch.channels.status import StatusReader

# Trains a fixed number of steps: slowly, so that it can be disturbed, until the test wants it to come to its end.
SCRIPT = """
import os, select, sys, time
sys.path.insert(0, {tests!r})
import torch
import lockstep
from training import Job, loader_of, make, train_step

run = lockstep.start(lanes=8, seed=3)
job = Job(model="conv")
model, optimizer = make(job)
run.replicate(model, optimizer)
loader = run.shard(loader_of(job))
for epoch in run.epochs({epochs}):
    for batch in loader:
        train_step(run, job, model, optimizer, batch)
        if not os.path.exists({hurry!r}):
            select.select([], [], [], {pause_s})
        run.print("step", run.step, "workers", run.size, flush=True)
    {each_epoch}
run.print("digest", run.digest(), run.step, flush=True)
"""

# How a script begins whose workers die by themselves, in logical time: each moment of `deaths` kills once in all.
DYING = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import lockstep

def reach(*moment):
    mark = os.path.join({folder!r}, "died " + " ".join(map(str, moment)))
    if moment in {deaths!r} and not os.path.exists(mark):
        open(mark, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""


class Launched:
    """A launch under way. What it shows is kept line by line, with the time it came."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self.process = folder, process
        self.lines: list[tuple[float, str]] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str, *, after: int = 0, within_s: float = 60.0) -> int:
        """The number of the first line, from line `after` on, in which the pattern is found."""
        deadline_s = time.monotonic() + within_s
        with self._news:
            while True:
                for number in range(after, len(self.lines)):
                    if re.search(pattern, self.lines[number][1]):
                        return number
                ended = self.process.poll() is not None and not self._reader.is_alive()
                if ended or time.monotonic() > deadline_s:
                    raise AssertionError(f"{pattern!r} never came:\n{self.shown()}")
                self._news.wait(0.2)

    def members(self) -> dict[int, int]:
        """The process of each slot that is a member now, as the launcher's page tells it."""
        fd = self._page()
        with closing(StatusReader(fd)) as page:
            rows = page.rows()
        os.close(fd)
        newest = max(row.generation for row in rows.values())
        return {slot: row.pid for slot, row in rows.items() if row.generation == newest and psutil.pid_exists(row.pid)}

    def _page(self) -> int:
        for fd in Path(f"/proc/{self.process.pid}/fd").iterdir():
            if "lockstep-status" in os.readlink(fd):
                return os.open(fd, os.O_RDONLY)
        raise AssertionError("the launcher has no status page")

    def next_step(self) -> int:
        """Returns when another step is shown; gives the number of its line."""
        return self.wait_for(r"^step \d+", after=len(self.lines))

    def await_workers(self, number: int, within_s: float = 60.0) -> None:
        self.wait_for(rf"^step \d+ workers {number}$", after=len(self.lines), within_s=within_s)

    def finish(self, within_s: float = 120.0) -> tuple[str, int]:
        """Lets the run come to its end; gives its digest and the number of its steps."""
        (self.folder / "hurry").touch()
        self.process.wait(within_s)
        self._reader.join()
        assert self.process.returncode == 0, self.shown()
        found = re.search(r"^digest (\w+) (\d+)$", self.shown(), re.MULTILINE)
        assert found, self.shown()
        return found[1], int(found[2])

    def close(self) -> None:
        """All that was shown has been read; the launch has ended."""
        self._reader.join()

    def shown(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append((time.monotonic(), line.rstrip("\n")))
                self._news.notify_all()


@contextmanager
def launched(
    folder: Path, *options: str, epochs: int = 30, pause_s: float = 0.2, each_epoch: str = "pass"
) -> Iterator[Launched]:
    """A run of 4 steps an epoch; afterwards nothing of it is left."""
    folder.mkdir(exist_ok=True)
    text = SCRIPT.format(
        tests=str(REPOSITORY / "tests"),
        epochs=epochs,
        hurry=str(folder / "hurry"),
        pause_s=pause_s,
        each_epoch=each_epoch,
    )
    with launched_script(folder, text, *options) as run:
        yield run


def dying(script: str, folder: Path, deaths: Sequence[tuple[object, ...]]) -> str:
    """The script with its beginning: a worker dies where it calls `reach` with one of `deaths`, once in all."""
    return DYING.format(tests=str(REPOSITORY / "tests"), folder=str(folder), deaths=tuple(deaths)) + script


def died(folder: Path) -> int:
    """How many moments have killed a worker."""
    return len(list(folder.glob("died *")))


def result_of(script: str) -> list[object]:
    """In a worker: what the script's run came to, its digest and the number of its steps."""
    names: dict[str, Any] = {}
    exec(compile(script, "train.py", "exec"), names)
    return [names["run"].digest(), names["run"].step]


@contextmanager
def launched_script(folder: Path, text: str, *options: str, **variables: str) -> Iterator[Launched]:
    """A run of any script; afterwards nothing of it is left. `variables` are added to its environment."""
    script = folder / "train.py"
    script.write_text(text)
    with launched_command(folder, "run", *options, str(script), **variables) as run:
        yield run


@contextmanager
def launched_command(
    folder: Path, *words: str, popen: type["subprocess.Popen[Any]"] = Forked, **variables: str
) -> Iterator[Launched]:
    """`lockstep` with these words; afterwards nothing of it is left. With `subprocess.Popen` all its processes load
    torch themselves, as a user's do."""
    process = popen(
        [sys.executable, "-m", "lockstep", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | variables,
        start_new_session=True,
    )
    run = Launched(folder, process)
    try:
        yield run
    finally:
        if process.poll() is None:
            end_launch(process)
        run.close()


def scale(run_dir: Path, number: int) -> None:
    ended = start_lockstep("scale", str(run_dir), str(number), cwd=REPOSITORY)
    _, err = ended.communicate(timeout=60)
    assert ended.returncode == 0, err


def send(pid: int, signum: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, signum)
