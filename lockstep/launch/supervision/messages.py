"""The launcher's messages to the user, at most six lines each: what a reader of its events writes, and nothing else."""

import os
import re
from collections.abc import Callable, Iterable, Mapping

from lockstep.errors import explained
from lockstep.events import Event, Note
from lockstep.launch import events
from lockstep.launch.channels.failure import EXITED, KILLED, QUIT, RAISED, Failure
from lockstep.launch.channels.status import Collective, Phase, StatusRow
from lockstep.launch.channels.traceback_lines import Frame
from lockstep.launch.supervision.hangs import STEP, Late, WorkerView, call_of
from lockstep.launch.supervision.stragglers import Slow, SlowCause

_LONGEST = 600
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped", "t": "held by a debugger"}
_MOST_TIMES = 100
_MOST_NAMED = 4
# The message of torch's init_process_group when its variables are not set.
_UNSET = re.compile("environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set")
_SPENT_ON = {SlowCause.DATA: "loading", SlowCause.COMPUTE: "its lanes", SlowCause.OTHER: "between steps"}
_ADVICE = {
    SlowCause.DATA: "its loader needs more processes (num_workers), or its disk is slow or busy",
    SlowCause.COMPUTE: "look for another load on its cores; with rebalancing, and enough lanes, some move away",
    SlowCause.OTHER: "look at what it alone does between steps, such as evaluating, saving or logging",
}


Found = events.HangFound | events.LateFound | events.StoppedFound | events.SlowFound | events.CatchUpFound


class LauncherConsole:
    """A reader of the launcher's events: gives `say` the message of each that has one."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def __call__(self, event: Event) -> None:
        if text := message(event):
            self._say(text)


def message(event: Event) -> str:
    """What the user reads of an event; "" if nothing."""
    match event:
        case Note(text=text):
            return text
        case events.RunFailed():
            return _failure(event)
        case events.RunInterrupted():
            by = "Ctrl-C" if event.signal == "SIGINT" else event.signal
            return f"✗ stopped by {by}; {_all_ended(event.num_workers, event.folder)}"
        case events.OutputLost():
            return f"✗ the output cannot be written: {event.reason}; {_all_ended(event.num_workers, event.folder)}"
        case events.RanApart() | events.NobodyStarted():
            return _apart(event)
    return _found(event) if isinstance(event, Found) else _change(event)


def _change(event: Event) -> str:
    """Of workers that were lost, come, leave or start again."""
    match event:
        case events.MemberLost():
            return f"! {_headline(event.failure)}"
        case events.JoinerLost():
            again = "tried again" if event.is_retried else "not tried again"
            return f"! {_headline(event.failure)}, before it had joined: {again}"
        case events.JoinerMisplaced() if event.failure.message:
            return f"! worker {event.worker} gives its place up: {event.failure.message}"
        case events.JoinersGivenUp():
            misplaced = f"{event.num_misplaced} new workers have not found their place in the script"
            return f"  {misplaced}: no more are started, and the others go on"
        case events.WorkerNotStarted():
            return f"! {event.reason}; the others go on without it"
        case events.RunScaled() if event.num_wanted > event.num_before:
            more = count(event.num_wanted - event.num_before, "more worker")
            return f"  {more} will join: {event.num_wanted} wanted"
        case events.LeavingAsked():
            verb = "leaves" if len(event.slots) == 1 else "leave"
            return f"  {listed(event.slots, 'worker')} {verb} after the step: {event.num_wanted} wanted"
        case events.RunRestarted():
            return _restart(event)
    return ""


def _found(event: Found) -> str:
    """What the watchdog has found."""
    match event:
        case events.LateFound():
            return late_message(event.finding, event.views, event.places, event.time_s)
        case events.HangFound():
            return hung_message(event)
        case events.SlowFound():
            return slow_message(event.finding)
        case events.CatchUpFound():
            return f"  worker {event.worker} has caught up: it is not slow any more"
        case events.StoppedFound():
            moment = f" at step {event.step}" if event.is_member else ""
            stopped = f"worker {event.worker} ({event.worker_id}) is stopped{moment}"
            return f"! {stopped} (state T, since {event.seconds:.1f} s): it is ended and replaced"


def _failure(event: events.RunFailed) -> str:
    """What failed and where, why that ends the run, how the others are, and where the log is."""
    failure, why = event.failure, [f"  {event.why}"] if event.why else []
    lines = [f"✗ {_headline(failure)}", *_places(failure.frames), *_hint(failure), *why]
    num_failed_too = sum(not other.secondary for other in event.others)
    return "\n".join([*lines, f"  {_others(event.num_well, num_failed_too)}Full log: {_near(event.log_path)}"])


def failure_sentence(failure: Failure) -> str:
    """`worker 2 failed at step 412: ValueError: bad sample, at train.py:57 in collate`"""
    where = "".join(f", at {_near(frame.file)}:{frame.line} in {frame.function}" for frame in failure.frames[-1:])
    return f"{_headline(failure)}{where}"


def _restart(event: events.RunRestarted) -> str:
    workers = "the worker starts" if event.num_workers == 1 else f"all {event.num_workers} workers start"
    if not event.has_trained:
        return f"  no step was made yet: {workers} again"
    return f"  nobody is left who could go on: {workers} again, from the newest checkpoint"


def _all_ended(num_workers: int, folder: str) -> str:
    workers = "the worker has" if num_workers == 1 else f"all {num_workers} workers have"
    return f"{workers} ended. Logs: {folder}"


def _apart(event: events.RanApart | events.NobodyStarted) -> str:
    """Of workers of which none has called `lockstep.start`."""
    if isinstance(event, events.NobodyStarted):
        return (
            f"! nobody has called lockstep.start for {event.seconds:.0f} s: without it each of the "
            f"{event.num_workers} workers runs the whole script by itself"
        )
    return (
        f"✗ nobody called lockstep.start: each of the {event.num_workers} workers ran the whole script by itself. "
        "Write `run = lockstep.start()` and what follows from it, or say --torch-distributed if the script opens a "
        "process group of its own"
    )


def late_message(late: Late, views: Mapping[int, WorkerView], places: Mapping[int, Frame], now_s: float) -> str:
    """Two lines: how late the step or call is, and which workers wait for which; `places` are the suspects' stacks."""
    if not late.waiting:
        who = "the worker does nothing" if len(late.missing) == 1 else f"all {len(late.missing)} workers do nothing"
        headline = f"! step {late.step} does not get on: {who}, since {late.seconds:.0f} s"
        return f"{headline}\n    {_each(late.missing, views, places, now_s)}"
    waiting: dict[str, list[int]] = {}
    for slot in late.waiting:
        waiting.setdefault(_waits_in(views[slot].row), []).append(slot)
    waits = ", ".join(f"{_runs(slots)} ({what})" for what, slots in waiting.items())
    missing = _each(late.missing, views, places, now_s) if late.missing else "nobody"
    return f"! {_late_what(late)}\n    waiting: {waits}    missing: {missing}"


def hung_message(hung: events.HangFound) -> str:
    """One line, after the `late_message` that has named the suspects."""
    for_s = f"for {hung.seconds:.0f} s (--hang-s)"
    if not hung.is_all:
        return f"  worker {hung.slots[0]} shows no sign of work {for_s}: it is ended"
    who, end = ("the worker", "it is") if len(hung.slots) == 1 else (f"all {len(hung.slots)} workers", "they are")
    verb = "shows" if len(hung.slots) == 1 else "show"
    return f"  {who} {verb} no sign of work {for_s}: {end} ended"


def slow_message(news: Slow) -> str:
    """Two lines: how slow the worker is, in what, and what to do."""
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


def _late_what(late: Late) -> str:
    if late.what == STEP:
        usually = "a usual step is not known yet" if late.usual_s is None else f"usually {late.usual_s:.2f} s"
        return f"step {late.step} is late: {late.seconds:.1f} s ({usually})"
    at_step = f" at step {late.step}" if late.step else ""
    return f"{late.what}{at_step} is late: {late.seconds:.1f} s"


def _waits_in(row: StatusRow) -> str:
    if row.phase == Phase.AWAITING:
        return "batch norm" if row.detail_a == Collective.STATISTICS else call_of(row)
    if row.phase == Phase.RECOVERING:
        return "recovery"
    return f"reduce, bucket {row.detail_a + 1} of {row.detail_b}" if row.detail_b else "reduce"


def _each(slots: tuple[int, ...], views: Mapping[int, WorkerView], places: Mapping[int, Frame], now_s: float) -> str:
    """Where each worker is, up to a few."""
    named = [_where(slot, views[slot], places.get(slot), now_s) for slot in slots[:_MOST_NAMED]]
    more = [f"and {len(slots) - _MOST_NAMED} more"] if len(slots) > _MOST_NAMED else []
    return ", ".join(named + more)


def _where(slot: int, view: WorkerView, place: Frame | None, now_s: float) -> str:
    state = [f"{_STATES.get(view.state, 'ending')}, state {view.state}"] if view.state else []
    since_s = now_s - view.row.since_ns / 1e9
    since = f"since {since_s:.1f} s" if view.row.has_started else "has not called lockstep.start"
    where = "" if place is None else f"; {_near(place.file)}:{place.line} {place.source}".rstrip()
    return f"{slot} ({', '.join([*state, since])}{where})"


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
        return f"{_named(failure)} was killed by {failure.kind}{moment}{_colon(failure.message)}"
    if failure.how == QUIT:
        return f"worker {failure.rank} called sys.exit({_one_line(failure.kind)}){_place_and_step(failure)}"
    if failure.is_loss:
        return f"{_named(failure)} was left out by the others{moment}"
    if failure.how == EXITED:
        early = ", without closing its run" if failure.kind == "0" else ""
        return f"worker {failure.rank} exited with code {failure.kind}{moment}{early}"
    return f"worker {failure.rank} failed{moment}: {failure.kind}{_colon(_one_line(failure.message))}"


def _named(failure: Failure) -> str:
    return f"worker {failure.rank}" + (f" ({failure.worker_id})" if failure.worker_id else "")


def _place_and_step(failure: Failure) -> str:
    place = [f"{_near(frame.file)}:{frame.line}" for frame in failure.frames[-1:]]
    step = [] if failure.step is None else [f"step {failure.step}"]
    return f" at {', '.join(place + step)}" if place or step else ""


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
    if failure.how == RAISED and _UNSET.search(failure.message):
        return ["  `lockstep run --torch-distributed` sets it, for scripts that open a process group themselves."]
    if failure.how == KILLED and failure.kind == "SIGKILL" and not failure.message:
        return ["  SIGKILL often means that the host ran out of memory: look at `dmesg`, or use fewer workers."]
    return [f"  {hint}" for hint in [explained(failure.message)] if hint]


def _others(num_others: int, num_failed_too: int) -> str:
    failed = f"{count(num_failed_too, 'other worker')} failed too. " if num_failed_too else ""
    fine = f"{count(num_others, 'other worker')} {'was' if num_others == 1 else 'were'} fine. " if num_others else ""
    return failed + fine


def _near(path: str) -> str:
    """The path relative to the working directory, if that exists and contains it."""
    try:
        near = os.path.relpath(path)
    except FileNotFoundError:
        return path
    return path if near.startswith(os.pardir) else near
