"""Telling the user about a failure, in at most six lines."""

import os
from pathlib import Path

from lockstep.run.launching.failure import EXITED, KILLED, Failure
from lockstep.run.launching.frames import Frame

_LONGEST = 300


def render(failure: Failure, num_others: int, log_path: Path, *, num_failed_too: int = 0) -> str:
    """What failed and where, how the others are, and where to read on.

    `num_others` workers were well until then; `num_failed_too` failed as well, each for a reason of its own.
    """
    lines = [f"✗ {_headline(failure)}", *_places(failure.frames), *_hint(failure)]
    return "\n".join([*lines, f"  {_others(num_others, num_failed_too)}Full log: {_near(str(log_path))}"])


def _headline(failure: Failure) -> str:
    if failure.how == KILLED:
        return f"worker {failure.rank} (pid {failure.pid}) was killed by {failure.kind}{_colon(failure.message)}"
    if failure.how == EXITED:
        return f"worker {failure.rank} exited with code {failure.kind}"
    moment = "" if failure.step is None else f" at step {failure.step}"
    return f"worker {failure.rank} failed{moment}: {failure.kind}{_colon(_one_line(failure.message))}"


def _colon(text: str) -> str:
    return f": {text}" if text else ""


def _one_line(message: str) -> str:
    first, *more = message.strip().splitlines() or [""]
    return first[:_LONGEST] + (" ..." if more or len(first) > _LONGEST else "")


def _places(frames: tuple[Frame, ...]) -> list[str]:
    where = [f"{_near(frame.file)}:{frame.line}" for frame in frames]
    inside = [f"in {frame.function}" if frame.function else "" for frame in frames]
    wide, deep = max(map(len, where), default=0), max(map(len, inside), default=0)
    return [
        f"    {place:<{wide}}  {function:<{deep}}     {frame.source}".rstrip()
        for place, function, frame in zip(where, inside, frames, strict=True)
    ]


def _hint(failure: Failure) -> list[str]:
    if failure.how == KILLED and failure.kind == "SIGKILL" and not failure.message:
        return ["  SIGKILL often means that the host ran out of memory: look at `dmesg`, or use fewer workers."]
    return []


def _others(num_others: int, num_failed_too: int) -> str:
    told = ""
    if num_failed_too:
        told += f"{_count(num_failed_too)} failed too. "
    if num_others:
        were, are = ("was", "is") if num_others == 1 else ("were", "are")
        told += f"{_count(num_others)} {were} waiting for it and {are} fine. "
    return told


def _count(number: int) -> str:
    return "1 other worker" if number == 1 else f"{number} other workers"


def _near(path: str) -> str:
    """The path as one would type it from here."""
    near = os.path.relpath(path)
    return path if near.startswith(os.pardir) else near
