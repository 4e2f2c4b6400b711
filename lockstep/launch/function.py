"""`lockstep.launch(fn, ...)`: a function on several workers, from a notebook or a script.

# Note [Launch from a kernel]
# The workers are those of `lockstep run`: new processes, started by the same pool. The caller's process is not forked,
# so it may have used CUDA, and have threads. It is the launcher while the call lasts: an interrupt of the kernel is a
# Ctrl-C to the launcher, and its end is that of the workers.
"""

import codecs
import linecache
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from lockstep import version
from lockstep.errors import BadArgument, BadEnvironment, LaunchFailed
from lockstep.launch.call import CallHeader, cloudpickle, read_value, write_call
from lockstep.launch.channels.exits import CTRL_C, DONE, TERMINATED
from lockstep.launch.channels.status import MAX_SLOTS
from lockstep.launch.host.folder import name_from, new_run_folder
from lockstep.launch.job import FAULT_BUDGET, Job
from lockstep.launch.launch import LaunchOutcome, launch
from lockstep.launch.supervision.messages import failure_sentence
from lockstep.settings.environment import process_environment

OPTIONS = ("lanes", "seed", "threads", "device", "strategy", "load_once", "spares", "copies", "fault_budget", "hang_s",
           "resume", "checkpoints", "checkpoint_every", "checkpoint_keep")  # fmt: skip
"""Those of `lockstep run` that a launch takes too, by the same names."""


def launch_function(
    fn: Callable[..., Any], *args: Any, n: int = 1, run_dir: str | os.PathLike[str] | None = None, **options: Any
) -> Any:
    """Calls `fn(*args)` on `n` workers, as `lockstep run -n` would run a script; gives what it returned on worker 0.

    `fn` calls `lockstep.start()`. The first worker's output comes to this process's stdout. A lost worker is replaced.
    Raises LaunchFailed when the run fails, and KeyboardInterrupt, when the workers have ended in order, on Ctrl-C.
    """
    _refuse(fn, n, options)
    cloudpickle()
    cells = notebook_cells()
    name = getattr(fn, "__name__", type(fn).__name__)
    with _private_folder() as folder:
        header = CallHeader(name, [path for path in sys.path if path], {cell.file: cell.text for cell in cells})
        write_call(folder, header, fn, args)
        job = _job(folder, _run_folder(run_dir, name), n, options)
        screen = CellScreen(cells)
        outcome = launch(job, show=screen.show, say=screen.say)
        _raise_unless_done(outcome, name, screen)
        return read_value(folder)


@dataclass(frozen=True)
class Cell:
    """A cell of a notebook: the name of the file that there is not, its text, and how the notebook calls it."""

    file: str
    text: str
    label: str


def notebook_cells() -> list[Cell]:
    """The cells that have run in this kernel; none in a script. Python knows their text under names of no file."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    label_of = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)
    entries = [(name, entry) for name, entry in list(linecache.cache.items()) if len(entry) == 4]
    return [
        Cell(name, "".join(entry[2]), " ".join(label_of(name) or (os.path.basename(name),)))
        for name, entry in entries
        if entry[1] is None and not os.path.exists(name)
    ]


class CellScreen:
    """Worker 0's output and the launcher's messages as text, on the caller's streams, each on lines of its own.

    In a kernel these are no files: they take text, and show it below the cell. Files of cells are called by the
    notebook's names.
    """

    def __init__(self, cells: list[Cell], out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._cells, self._out, self._err = cells, out or sys.stdout, err or sys.stderr
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_line = False

    def show(self, output: bytes) -> None:
        text = self.named(self._decoder.decode(output))
        if text:
            self._out.write(text)
            self._out.flush()
            self._in_line = not text.endswith("\n")

    def say(self, text: str) -> None:
        self._err.write("\n" * self._in_line + self.named(text) + "\n")
        self._err.flush()
        self._in_line = False

    def named(self, text: str) -> str:
        for cell in self._cells:
            for file in (cell.file, os.path.relpath(cell.file)):
                text = text.replace(f'File "{file}", line ', f"{cell.label}, line ").replace(
                    f"{file}:", f"{cell.label}, line "
                )
        return text


def _refuse(fn: Any, n: Any, options: Mapping[str, Any]) -> None:
    if not callable(fn):
        raise BadArgument(f"lockstep.launch takes a function and its arguments, not {fn!r:.60}")
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_SLOTS:
        raise BadArgument(f"lockstep.launch takes n=1 to n={MAX_SLOTS} workers, not {n!r:.60}")
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise BadArgument(
            f"lockstep.launch has no option {unknown[0]}; it has n, run_dir, {', '.join(OPTIONS)}. Arguments of the "
            "function are given by position; functools.partial takes those by name"
        )
    if threading.current_thread() is not threading.main_thread():
        raise BadEnvironment("lockstep.launch must be called by the main thread, which alone is interrupted by Ctrl-C")
    if not sys.executable:
        raise BadEnvironment("this process does not know its Python (sys.executable is empty): use `lockstep run`")


def _job(folder: Path, run_dir: Path, n: int, options: Mapping[str, Any]) -> Job:
    given = {name: value for name, value in options.items() if value is not None}
    if "checkpoints" in given:
        given["checkpoints"] = Path(given["checkpoints"])
    return Job(
        program="lockstep.launch.call",
        run_dir=run_dir,
        module=True,
        arguments=(str(folder),),
        num_workers=n,
        environment=_importable(),
        **{"fault_budget": FAULT_BUDGET, **given},
    )


def _importable() -> dict[str, str]:
    """For a lockstep that this process has found in a folder of its own, as in a source tree."""
    root = str(Path(version.__file__).parents[1])
    already = [path for path in process_environment().get("PYTHONPATH", "").split(os.pathsep) if path]
    return {} if "site-packages" in root else {"PYTHONPATH": os.pathsep.join([root, *already])}


def _run_folder(run_dir: str | os.PathLike[str] | None, name: str) -> Path:
    if run_dir is None:
        return new_run_folder(Path("runs"), name_from(name))
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadArgument(f"run_dir={str(run_dir)!r} cannot be made: {error.strerror}") from error
    return Path(run_dir)


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder that only this user can enter. See Note [Files of a call] in call.py."""
    with tempfile.TemporaryDirectory(prefix="lockstep-call-") as folder:  # made with mode 0700
        yield Path(folder)


def _raise_unless_done(outcome: LaunchOutcome, name: str, screen: CellScreen) -> None:
    if outcome.exit_code == CTRL_C:
        raise KeyboardInterrupt
    if outcome.exit_code == TERMINATED:
        raise SystemExit(TERMINATED)
    if outcome.failure is not None:
        raise LaunchFailed(screen.named(failure_sentence(outcome.failure)))
    if outcome.exit_code != DONE:
        raise LaunchFailed(
            f"{name} has not come to its end: the lines above say why. It calls lockstep.start(), as a script does"
        )
