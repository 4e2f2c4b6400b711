"""Runs examples as a reader would, each command once for all tests that look at it."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
Command = tuple[str, ...]


def alone(example: str, *arguments: str) -> Command:
    """`python examples/<example>.py`"""
    return (sys.executable, str(REPOSITORY / f"examples/{example}.py"), *arguments)


def on(num_workers: int, example: str, *arguments: str, options: Command = ()) -> Command:
    """`lockstep run -n <num_workers> examples/<example>.py`"""
    launcher = (sys.executable, "-m", "lockstep", "run", "-n", str(num_workers), *options)
    return (*launcher, *alone(example, *arguments)[1:])


class Shell:
    """What commands print, less lockstep's start lines. They run in `folder`, two at a time, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._printed: dict[Command, str] = {}

    def __call__(self, *commands: Command) -> list[str]:
        new = [command for command in commands if command not in self._printed]
        with ThreadPoolExecutor(2) as pool:
            self._printed.update(zip(new, pool.map(self._run, new), strict=True))
        return [self._printed[command] for command in commands]

    def _run(self, command: Command) -> str:
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert ended.returncode == 0, f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr}"
        lines = ended.stdout.splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith(("lockstep ", "  wire: ")))
