"""Who reads the events of a run: the console, the files in its folder, and `lockstep verify`."""

import os
import sys

from lockstep.errors import BadEnvironment
from lockstep.events import (
    Closed,
    Copied,
    Event,
    GenerationFormed,
    NoiseMeasured,
    Note,
    Started,
    StepBegan,
    StepCommitted,
)
from lockstep.launch.channels.failure import id_of_process, note_of
from lockstep.launch.worker.identity import OURS
from lockstep.observe.console import SHOWN, Console
from lockstep.observe.finish import Finish, FinishMark
from lockstep.observe.history import READ as HISTORY
from lockstep.observe.history import StepHistory
from lockstep.observe.json_lines import only_first
from lockstep.observe.recorder import Recorder
from lockstep.run.context import Context
from lockstep.run.faults import FaultWatch
from lockstep.run.run import Run
from lockstep.settings.environment import LaunchPlace, Overrides
from lockstep.verify.trace import READ as TRACED
from lockstep.verify.trace import Dump, Trace


def subscribe_readers(run: Run, context: Context, place: LaunchPlace) -> None:
    """Each reads from now on until the run is closed."""
    overrides, events = context.overrides, context.events
    events.subscribe(
        Console(
            sys.stderr,
            lambda: run.is_first,
            launcher_reports=overrides.status_fd is not None,
            run_dir=overrides.run_dir,
            has_failed=lambda: run.failed,
        ),
        *SHOWN,
    )
    if OURS.boot is not None:
        events.subscribe(_pass_on, Note)
    if overrides.run_dir is not None:
        complain_once = only_first(events.note)
        events.subscribe(Recorder(overrides.run_dir, lambda: run.is_first, complain_once), NoiseMeasured)
        history = StepHistory(overrides.run_dir, lambda: run.is_first, lambda: _lanes_of(run), complain_once)
        events.subscribe(history, *HISTORY)
        # `lockstep run` has an exit code of its own; under another launcher the mark is what others go by.
        complain = events.note if overrides.status_fd is None else complain_once
        mark = FinishMark(overrides.run_dir, lambda: run.is_first, lambda: _finish(run), complain)
        events.subscribe(mark, Started, Closed)
    if overrides.trace_dir is not None:
        trace = Trace(overrides.trace_dir, place.world.rank, run.sources, is_replacement=not run.guard.is_member)
        events.subscribe(trace, *TRACED)
    if overrides.timeline:
        _show_timeline(run, overrides)
    if overrides.fault is not None and overrides.run_dir is not None:
        watch = FaultWatch(overrides.fault, run.guard, context.status, place.world.rank, overrides.run_dir)
        events.subscribe(watch, StepBegan, StepCommitted, GenerationFormed, Copied)
    if overrides.dump_path is not None and place.world.rank == 0:
        events.subscribe(Dump(overrides.dump_path, run.state), Closed)


def _pass_on(event: Event) -> None:
    """The launcher shows one worker's output: what holds for another worker alone it must be told."""
    if isinstance(event, Note) and event.one_worker and not event.in_log and OURS.boot is not None and OURS.is_worker:
        os.write(OURS.boot.notice_fd, note_of(id_of_process(OURS.pid), event.text))


def _show_timeline(run: Run, overrides: Overrides) -> None:
    if overrides.run_dir is None:
        raise BadEnvironment("LOCKSTEP_TIMELINE is set, and LOCKSTEP_RUN_DIR is not: a timeline needs a folder")
    run.timeline(steps=None)


def _lanes_of(run: Run) -> dict[int, int]:
    """How many lanes each worker carries now, by slot."""
    generation = run.guard.generation
    return dict(zip(generation.slots, map(len, generation.assignment.lanes_of), strict=True))


def _finish(run: Run) -> Finish | None:
    """The end of the run, if it is one: nothing has failed, and no signal has ended it or this worker's part in it."""
    if run.failed or run.guard.formation.is_stopped or not run.guard.is_member:
        return None
    return Finish(run.step, run.size)
