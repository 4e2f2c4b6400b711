"""Runs examples as a reader would, each command once for all tests that look at it.

Most run in workers forked from the test's process, which has torch loaded, so that a command costs a second or two.
Those in REAL, and those with options of the launcher, are started from nothing, as by a shell.
"""

import os
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from workers import all_values, fork, gather, on_workers

REPOSITORY = Path(__file__).parents[2]
REAL = {("02_lockstep", 2), ("ddp_unchanged", None)}
LIMIT_S = 150.0


@dataclass(frozen=True)
class Command:
    """`python examples/<example>.py`, or `lockstep run -n <num_workers> ...` of it."""

    example: str
    arguments: tuple[str, ...] = ()
    num_workers: int | None = None
    options: tuple[str, ...] = ()

    @property
    def is_real(self) -> bool:
        return bool(self.options) or (self.example, self.num_workers) in REAL

    @property
    def script(self) -> str:
        return str(REPOSITORY / f"examples/{self.example}.py")

    @property
    def words(self) -> list[str]:
        launcher = ["-m", "lockstep", "run", "-n", str(self.num_workers), *self.options] if self.num_workers else []
        return [sys.executable, *launcher, self.script, *self.arguments]


def alone(example: str, *arguments: str) -> Command:
    """`python examples/<example>.py`"""
    return Command(example, arguments)


def on(num_workers: int, example: str, *arguments: str, options: tuple[str, ...] = ()) -> Command:
    """`lockstep run -n <num_workers> examples/<example>.py`"""
    return Command(example, arguments, num_workers, options)


class Shell:
    """What commands print, less lockstep's start lines. They run in `folder`, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._printed: dict[Command, str] = {}

    def __call__(self, *commands: Command) -> list[str]:
        for command in commands:
            if command not in self._printed:
                run = self._start if command.is_real else self._fork
                lines = run(command).splitlines(keepends=True)
                kept = (line for line in lines if not line.startswith(("lockstep ", "  wire: ")))
                self._printed[command] = "".join(kept)
        return [self._printed[command] for command in commands]

    def _start(self, command: Command) -> str:
        ended = subprocess.run(
            command.words,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert ended.returncode == 0, f"{' '.join(command.words)} ended with {ended.returncode}:\n{ended.stderr}"
        return ended.stdout

    def _fork(self, command: Command) -> str:
        """Its workers' output, one after the other."""
        if command.num_workers is None:
            return "".join(all_values(gather([fork(_nowhere, LIMIT_S, _run, (command, self.folder), {})], LIMIT_S)))
        return "".join(on_workers(command.num_workers, _run, command, self.folder, limit_s=LIMIT_S))


def _nowhere() -> None:
    """The place of a process that nobody launched."""


def _run(command: Command, folder: Path) -> str:
    """In a worker: runs the script as Python would; gives what it has printed."""
    os.chdir(folder)
    output = folder / f"output-{os.getpid()}"
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.dup2(file, 1)
    sys.stdout = os.fdopen(1, "w")
    sys.argv = [command.script, *command.arguments]
    runpy.run_path(command.script, run_name="__main__")
    sys.stdout.flush()
    return output.read_text()
