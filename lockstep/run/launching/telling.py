"""Telling the user about a failure or a loss, in at most six lines."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from lockstep.errors import explained
from lockstep.run.launching.failure import EXITED, KILLED, Failure
from lockstep.run.launching.frames import Frame
from lockstep.run.launching.lateness import IDLE_S, Late, Look, Stopped
from lockstep.run.launching.slowness import CaughtUp, Cause, Slow

_LONGEST = 300
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped", "t": "held by a debugger"}
_MOST_TIMES = 100
_SPENT_ON = {Cause.DATA: "loading", Cause.COMPUTE: "its lanes", Cause.OTHER: "between steps"}
_ADVICE = {
    Cause.DATA: "its loader needs more processes (num_workers), or its disk is slow or busy",
    Cause.COMPUTE: "look for another load on its cores; an assignment (LOCKSTEP_ASSIGNMENT) can take lanes from it",
    Cause.OTHER: "look at what it alone does between steps, such as evaluating, saving or logging",
}


def render(failure: Failure, num_others: int, log_path: Path, *, num_failed_too: int = 0, why: str = "") -> str:
    """What failed and where, `why` that ends the run, how the others are, and where to read on.

    `num_others` workers were well until then; `num_failed_too` failed as well, each for a reason of its own.
    """
    lines = [f"✗ {_headline(failure)}", *_places(failure.frames), *_hint(failure), *([f"  {why}"] if why else [])]
    return "\n".join([*lines, f"  {_others(num_others, num_failed_too)}Full log: {_near(str(log_path))}"])


def tell_loss(failure: Failure) -> str:
    """One line for a worker that was lost while the run goes on."""
    return f"! {_headline(failure)}"


def tell_joiner(failure: Failure, retried: bool) -> str:
    """One line for a new worker that was lost before the others admitted it."""
    return f"! {_headline(failure)}, before it had joined: {'' if retried else 'not '}tried again"


def tell_again(num_workers: int) -> str:
    workers = "the worker starts" if num_workers == 1 else f"all {num_workers} workers start"
    return f"  nobody is left who could go on: {workers} again, from the newest checkpoint"


def tell_stopped(stopped: Stopped, look: Look) -> str:
    name = f"worker {stopped.slot} (pid {look.pid})"
    moment = f" at step {look.row.step}" if look.row.is_member else ""
    return f"! {name} is stopped{moment} (state T, since {stopped.seconds:.1f} s): it is ended and replaced"


def tell_late(late: Late, looks: Mapping[int, Look], places: Mapping[int, Frame], now_s: float) -> str:
    """Two lines: how late the step is, and who waits for whom; `places` are where the missing are in their code."""
    usually = "a usual step is not known yet" if late.usual_s is None else f"usually {late.usual_s:.2f} s"
    bucket, buckets = late.bucket
    what = f"reduce, bucket {bucket + 1} of {buckets}" if buckets else "reduce"
    missing = ", ".join(_missing(slot, looks[slot], places.get(slot), now_s) for slot in late.missing)
    return (
        f"! step {late.step} is late: {late.seconds:.1f} s ({usually})\n"
        f"    waiting: {_runs(late.waiting)} ({what})    missing: {missing}"
    )


def tell_hung(slot: int) -> str:
    return f"  worker {slot} does nothing (no CPU time for {IDLE_S:.0f} s): it is ended and replaced"


def tell_pace(news: Slow | CaughtUp) -> str:
    """Two lines for a slow worker: how slow, in what, and what to do. One for a worker that has caught up."""
    if isinstance(news, CaughtUp):
        return f"  worker {news.slot} has caught up: it is not slow any more"
    who, wait, whose = ("others", "wait", "their") if news.num_others > 1 else ("other", "waits", "its")
    times = f"{news.times:.1f}" if news.times < _MOST_TIMES else f"more than {_MOST_TIMES}"
    spent = f"{_SPENT_ON[news.cause]} {_duration(news.cause_s)} a step, {who} {_duration(news.others_s)}"
    return (
        f"! worker {news.slot} is slow: {times} times the {who} for {count(news.num_steps, 'step')}, in {news.cause} "
        f"({spent}); the {who} {wait} {100 * news.waiting_share:.0f} % of {whose} time\n"
        f"  {_ADVICE[news.cause]}"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def _missing(slot: int, look: Look, place: Frame | None, now_s: float) -> str:
    state = f"{_STATES.get(look.state, 'ending')}, state {look.state}"
    where = "" if place is None else f"; {_near(place.file)}:{place.line} {place.source}".rstrip()
    return f"{slot} ({state}, since {now_s - look.row.since_ns / 1e9:.1f} s{where})"


def _runs(slots: Iterable[int]) -> str:
    """`0 1 3`, and `0-5 7` where three or more follow each other."""
    runs: list[list[int]] = []
    for slot in sorted(slots):
        if runs and runs[-1][-1] == slot - 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(slots: Iterable[int], noun: str) -> str:
    """`worker 2`, `workers 2 and 3`, `workers 1, 2 and 3`."""
    *first, last = map(str, sorted(slots))
    return f"{noun}s {', '.join(first)} and {last}" if first else f"{noun} {last}"


def _headline(failure: Failure) -> str:
    moment = "" if failure.step is None else f" at step {failure.step}"
    if failure.how == KILLED:
        name = f"worker {failure.rank} (pid {failure.pid})"
        return f"{name} was killed by {failure.kind}{moment}{_colon(failure.message)}"
    if failure.how == EXITED:
        return f"worker {failure.rank} exited with code {failure.kind}{moment}"
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
    return [f"  {hint}" for hint in [explained(failure.message)] if hint]


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
