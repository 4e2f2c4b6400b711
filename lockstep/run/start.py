"""`lockstep.start()`: finds the other workers, opens the wire, and makes the run."""

import atexit
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from lockstep.chance import fold, set_generators
from lockstep.errors import BadArgument, told_as_lost
from lockstep.events import Events, Started
from lockstep.observe.console import Console
from lockstep.run import active
from lockstep.run.determinism import settle_process
from lockstep.run.environment import Place, find_place, process_environment, read_overrides
from lockstep.run.rendezvous import open_store
from lockstep.run.run import Run
from lockstep.run.settings import Asked, Settings, settle
from lockstep.verify.dump import Dump
from lockstep.verify.trace import Trace
from lockstep.version import VERSION
from lockstep.wire import Agreement, Plan, Wire, in_process, in_shared_memory, over_gloo


def start(
    *,
    lanes: int | None = None,
    seed: int | None = None,
    exact: bool = True,
    threads: int | None = None,
    assignment: Iterable[Iterable[int]] | None = None,
    bucket_bytes: int | None = None,
    wire: str | None = None,
    timeout_s: float = 600.0,
) -> Run:
    """Collective. Starts this worker's part of a run, under `lockstep run`, torchrun, Slurm, MPI, or alone.

    `lanes` defaults to the number of workers, `seed` to 0, `threads` (per worker) to 1: they fix the bits, so they do
    not follow from the hardware. `assignment` gives each worker's lanes by hand. `exact=False` gives up equal
    bits for speed. `wire` is "shared" (memory) for workers of one host and "gloo" otherwise. `timeout_s` is how long a
    silent worker is waited for.
    """
    active.refuse_second()
    asked = Asked(lanes, seed, exact, threads, _listed(assignment), bucket_bytes, wire, timeout_s)
    environ = process_environment()
    place, overrides = find_place(environ), read_overrides(environ)
    settings = settle(asked, overrides, place.world)
    undo = settle_process(settings.threads, settings.exact)
    opened = _open_wire(place, settings)
    with told_as_lost(0, "lockstep.start"):
        _agree(opened, settings)
    events = Events()
    if place.world.rank == 0:
        events.subscribe(Console(sys.stderr))
    run = Run(settings, opened, events, undo, tracing=overrides.trace_dir is not None)
    if overrides.trace_dir is not None:
        events.subscribe(Trace(overrides.trace_dir, place.world.rank, run.state, run.buffer_names))
    if overrides.dump_path is not None and place.world.rank == 0:
        events.subscribe(Dump(overrides.dump_path, run.state))
    active.activate(run)
    _close_at_exit(run, undo)
    set_generators(fold(settings.seed, "outside"))
    events.emit(_started(place, settings))
    return run


def _open_wire(place: Place, settings: Settings) -> Wire:
    if place.world.size == 1:
        return in_process()
    opening = in_shared_memory if settings.wire == "shared" else over_gloo
    return opening(place.world, open_store(place, settings.timeout_s), settings.timeout_s)


def _agree(wire: Wire, settings: Settings) -> None:
    """Collective. Refuses workers that were started with different settings, with the first difference."""
    facts = {
        "operation": "lockstep.start",
        "lanes": settings.assignment.num_lanes,
        "assignment of lanes": settings.assignment.lanes_of,
        "seed": settings.seed,
        "threads": settings.threads,
        "exact": settings.exact,
        "bucket_bytes": settings.bucket_bytes,
        "wire": settings.wire,
        **_versions(),
    }
    Agreement(wire.transport, Plan(facts)).check()


def _versions() -> dict[str, str]:
    return {"version of lockstep": VERSION, "version of torch": torch.__version__}


def _started(place: Place, settings: Settings) -> Started:
    return Started(
        script=Path(sys.argv[0]).name or "python",
        num_workers=place.world.size,
        num_lanes=settings.assignment.num_lanes,
        seed=settings.seed,
        threads=settings.threads,
        exact=settings.exact,
        notes=settings.notes,
    )


def _close_at_exit(run: Run, undo: ExitStack) -> None:
    """Ends the run with the process; a process that dies of an exception does not wait for its peers."""
    before = sys.excepthook

    def note_failure(*error: Any) -> None:
        run.failed = True
        before(*error)

    sys.excepthook = note_failure
    undo.callback(setattr, sys, "excepthook", before)
    atexit.register(run.close)
    undo.callback(atexit.unregister, run.close)


def _listed(assignment: Iterable[Iterable[int]] | None) -> tuple[tuple[int, ...], ...] | None:
    if assignment is None:
        return None
    try:
        return tuple(tuple(int(lane) for lane in lanes) for lanes in assignment)
    except (TypeError, ValueError) as error:
        raise BadArgument(
            f"assignment takes a list of lanes for each worker, [[0, 1], [2, 3]], not {assignment!r}"
        ) from error
