"""`lockstep.start()`: finds the other workers, opens the wire, and makes the run."""

import atexit
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
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
from lockstep.wire import Agreement, Plan, Wire, in_process, in_shared_memory, over_gloo, over_hosts
from lockstep.wire.choice import bucket_bytes as suitable_bucket_bytes


def start(
    *,
    lanes: int | None = None,
    seed: int | None = None,
    exact: bool = True,
    threads: int | None = None,
    assignment: Iterable[Iterable[int]] | None = None,
    bucket_bytes: int | None = None,
    wire: str | None = None,
    algorithm: str | None = None,
    timeout_s: float = 600.0,
) -> Run:
    """Collective. Starts this worker's part of a run, under `lockstep run`, torchrun, Slurm, MPI, or alone.

    `lanes` defaults to the number of workers, `seed` to 0, `threads` (per worker) to 1: they fix the bits, so they do
    not follow from the hardware. `assignment` gives each worker's lanes by hand. `exact=False` gives up equal
    bits for speed. `wire` is "shared" (memory) for workers of one host and "hierarchical" or "gloo" otherwise.
    `algorithm` ("direct", "oneshot") and `bucket_bytes` are chosen for the measured link unless given. `timeout_s` is
    how long a silent worker is waited for.
    """
    active.refuse_second()
    asked = Asked(lanes, seed, exact, threads, _listed(assignment), bucket_bytes, wire, algorithm, timeout_s)
    environ = process_environment()
    place, overrides = find_place(environ), read_overrides(environ)
    settings = settle(asked, overrides, place.world)
    undo = settle_process(settings.threads, settings.exact)
    opened = _open_wire(place, settings)
    with told_as_lost(0, "lockstep.start"):
        _agree(opened, settings)
    settings = _with_bucket_bytes(settings, opened)
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
    events.emit(_started(place, settings, opened))
    return run


def _open_wire(place: Place, settings: Settings) -> Wire:
    if place.world.size == 1:
        return in_process()
    world, timeout_s = place.world, settings.timeout_s
    store = open_store(place, timeout_s)
    with told_as_lost(0, "lockstep.start"):
        match settings.wire:
            case "shared":
                return in_shared_memory(world, store, timeout_s)
            case "hierarchical":
                return over_hosts(world, store, timeout_s, algorithm=settings.algorithm)
            case _:
                return over_gloo(world, store, timeout_s, exact=settings.exact, algorithm=settings.algorithm)


def _with_bucket_bytes(settings: Settings, wire: Wire) -> Settings:
    """The same settings, with buckets of a size that suits the link; the user's own word goes first."""
    if settings.bucket_bytes is not None or wire.link is None:
        return settings
    return replace(settings, bucket_bytes=suitable_bucket_bytes(wire.link, wire.world.size))


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
        "algorithm": settings.algorithm,
        **_versions(),
    }
    Agreement(wire.transport, Plan(facts)).check()


def _versions() -> dict[str, str]:
    return {"version of lockstep": VERSION, "version of torch": torch.__version__}


def _started(place: Place, settings: Settings, wire: Wire) -> Started:
    return Started(
        script=Path(sys.argv[0]).name or "python",
        num_workers=place.world.size,
        num_lanes=settings.assignment.num_lanes,
        seed=settings.seed,
        threads=settings.threads,
        exact=settings.exact,
        wire=_wire_in_words(settings, wire),
        notes=settings.notes,
    )


def _wire_in_words(settings: Settings, wire: Wire) -> str:
    """`shared memory · 12.3 GB/s, 31 µs a round · buckets of 4 MiB`; nothing for a worker that is alone."""
    if wire.link is None or settings.bucket_bytes is None:
        return ""
    speed = f"{wire.link.bytes_per_s / 1e9:.3g} GB/s, {wire.link.latency_s * 1e6:.0f} µs a round"
    return f"{wire.how} · {speed} · buckets of {settings.bucket_bytes / 2**20:.3g} MiB"


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
