"""`lockstep.start()`: finds the other workers, opens the wire, and makes the run."""

import atexit
import hashlib
import platform
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lockstep.chance import fold, set_generators
from lockstep.determinism.hardware import gpu_name, hardware
from lockstep.determinism.operators import named_once
from lockstep.determinism.process import settle_process
from lockstep.elastic import Door, Recovery
from lockstep.elastic.founding import Directory, meet_founders, open_door
from lockstep.elastic.membership import Member, Membership, founded, joining
from lockstep.elastic.opener import Opener
from lockstep.elastic.rendezvous import open_store
from lockstep.errors import BadArgument, BadEnvironment, Disagreement, advise, told_as_lost
from lockstep.events import (
    Closed,
    Copied,
    Events,
    GenerationFormed,
    NoiseMeasured,
    Said,
    Started,
    StepBegins,
    StepCommitted,
)
from lockstep.launch.control import Control
from lockstep.launch.status import Call, NoStatus, StatusReader, StatusWriter
from lockstep.observe.console import TOLD, Console
from lockstep.observe.recorder import Recorder
from lockstep.run import active
from lockstep.run.faults import FaultWatch
from lockstep.run.run import Run
from lockstep.run.signals import handled
from lockstep.run.wait_watch import Waiting
from lockstep.settings.device import choose, count_gpus, in_words, sharing
from lockstep.settings.environment import Overrides, Place, find_place, process_environment, read_overrides
from lockstep.settings.options import Asked, Settings, settle, wire_on
from lockstep.verify.dump import Dump
from lockstep.verify.trace import Trace
from lockstep.version import VERSION
from lockstep.wire import Agreement, Proposal, Wire, in_process
from lockstep.wire.choice import bucket_bytes as suitable_bucket_bytes
from lockstep.wire.network.deadline import do_nothing
from lockstep.world import World


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
    timeout_s: float | None = None,
    recover: bool | None = None,
    not_finite: str = "keep",
    drift_every: int = 100,
    noise_every: int = 200,
    reduce_dtype: torch.dtype | str | None = None,
    flat: bool = False,
    device: torch.device | str | None = None,
) -> Run:
    """Collective. Starts this worker's part of a run, under `lockstep run`, torchrun, Slurm, MPI, or alone.

    `lanes` defaults to the number of workers, `seed` to 0, `threads` (per worker) to 1: they fix the bits, so they do
    not follow from the hardware. `assignment` gives each worker's lanes by hand. `exact=False` gives up equal
    bits for speed. `wire` is "shared" (memory) for workers of one host and "hierarchical" or "gloo" otherwise;
    on GPUs "nccl", or "gpu" (memory) where workers share one.
    `algorithm` ("direct", "oneshot") and `bucket_bytes` are chosen for the measured link unless given. `timeout_s` is
    how long a silent worker is waited for: 600, or as long as `lockstep run` bears it. `recover=False` ends the run
    when a worker is lost. `not_finite` says what becomes of a step whose gradient has NaN or infinity: "keep" it as it
    is, "skip" it, or "stop". Every `drift_every` steps (0: never) the workers compare their states, and every
    `noise_every` steps the noise of the gradient is measured for `run.noise`. Gradients are added up in
    `reduce_dtype`, or in the dtype of their parameter.
    With `flat=True` fused optimizers on a GPU update whole buckets instead of single parameters, to the same bits.
    `device` is "cpu", "cuda" (each worker its own GPU, the default where there are any) or "cuda:K".
    """
    active.refuse_second()
    asked = Asked(
        lanes, seed, exact, threads, _listed(assignment), bucket_bytes, wire, algorithm, timeout_s,
        recover, not_finite, drift_every, noise_every, reduce_dtype=reduce_dtype, flat=flat,
        device=str(device) if isinstance(device, torch.device) else device,
    )  # fmt: skip
    environ = process_environment()
    place, overrides = find_place(environ), read_overrides(environ)
    if active.has_changed():
        raise BadEnvironment(
            "workers have come or gone, or failed, in an earlier run of this script: a further one needs those that "
            "the first began with. Let each run have a script, or a process, of its own"
        )
    status = _status(place, overrides)
    try:
        run = _join(asked, place, overrides, status) if place.doors else _found(asked, place, overrides, status)
    except BaseException:
        if isinstance(status, Waiting):
            status.close()
        raise
    active.activate(run)
    return run


def _found(asked: Asked, place: Place, overrides: Overrides, status: StatusWriter | NoStatus) -> Run:
    """Collective. A worker of the first generation."""
    world = replace(place.world, generation=1)
    settings = _with_device(settle(asked, overrides, world), asked, overrides, world.local_rank, world.local_size)
    settings = replace(settings, wire=wire_on(settings.device, asked.wire, asked.algorithm, settings.wire, world))
    undo = settle_process(settings.threads, settings.exact, settings.device)
    opener = Opener(settings, world.on_one_host)
    with status.awaiting(Call.START), told_as_lost(0, "lockstep.start"):
        store = open_store(place, settings.timeout_s, active.num_before()) if world.size > 1 else None
        watch = do_nothing if _can_recover(settings, place) else None
        opened = in_process(world) if store is None else opener.open(world, store, watch)
        _agree(opened, settings)
    settings = _with_bucket_bytes(settings, opened)
    events = Events()
    run = _make_run(settings, opened, place, overrides, undo, events, status)
    if _can_recover(settings, place):
        door = open_door(place)
        with status.awaiting(Call.START), told_as_lost(0, "lockstep.start"):
            members = meet_founders(place, door, store)
        run.continuity.recovery = _recovery(founded(door.member, members), door, opener, opened, run, no_members)
        _make_copyable(run, place, overrides, settings, undo)
    run.continuity.charter = _charter(settings)
    run.continuity.place()
    set_generators(fold(settings.seed, "outside"))
    events.emit(_started(place, settings, opened, _device_in_words(asked, overrides, settings)))
    return run


def _join(asked: Asked, place: Place, overrides: Overrides, status: StatusWriter | NoStatus) -> Run:
    """A worker that comes later: alone until it is admitted. See Note [Newcomers] in guard.py."""
    page = None if overrides.status_fd is None else StatusReader(overrides.status_fd)
    directory = Directory(place, page)
    charter = directory.charter()
    _leave_unless_same(charter["run"])
    told = replace(overrides, lanes=charter["lanes"], seed=charter["seed"], threads=charter["threads"], assignment=None)
    settings = replace(settle(replace(asked, assignment=None), told, World()), bucket_bytes=charter["bucket_bytes"])
    by_hand = None if charter["assignment"] is None else tuple(map(tuple, charter["assignment"]))
    settings = replace(settings, wire=charter["wire"], algorithm=charter["algorithm"], by_hand=by_hand)
    slot = place.world.local_rank if place.slot is None else place.slot
    settings = _with_device(settings, asked, overrides, slot, charter["num_founders"])
    _refuse_difference(charter, _charter(settings), place)
    undo = settle_process(settings.threads, settings.exact, settings.device)
    wire = in_process(World())
    run = _make_run(settings, wire, place, overrides, undo, Events(), status)
    door = open_door(place)
    opener = Opener(settings, place.world.on_one_host)
    run.continuity.is_member = False
    run.continuity.recovery = _recovery(joining(door.member)[0], door, opener, wire, run, directory.members)
    _make_copyable(run, place, overrides, settings, undo)
    run.continuity.charter = _charter(settings)
    set_generators(fold(settings.seed, "outside"))
    return run


def _make_run(
    settings: Settings,
    wire: Wire,
    place: Place,
    overrides: Overrides,
    undo: ExitStack,
    events: Events,
    status: StatusWriter | NoStatus,
) -> Run:
    run = Run(settings, wire, events, undo, status, overrides)
    if isinstance(status, Waiting):
        status.watch(wire, settings.timeout_s)
    events.subscribe(
        Console(
            sys.stderr,
            lambda: run.is_first,
            launcher_tells=overrides.status_fd is not None,
            run_dir=overrides.run_dir,
            has_failed=lambda: run.failed,
        ),
        *TOLD,
    )
    if overrides.run_dir is not None:
        recorder = Recorder(overrides.run_dir, lambda: run.is_first, lambda text: events.emit(Said(text)))
        events.subscribe(recorder, NoiseMeasured)
    if overrides.trace_dir is not None:
        events.subscribe(Trace(overrides.trace_dir, place.world.rank, run.sources, is_replacement=bool(place.doors)))
    if overrides.fault is not None and overrides.run_dir is not None:
        watch = FaultWatch(overrides.fault, run, place.world.rank, overrides.run_dir)
        events.subscribe(watch, StepBegins, StepCommitted, GenerationFormed, Copied)
    if overrides.dump_path is not None and place.world.rank == 0:
        events.subscribe(Dump(overrides.dump_path, run.state), Closed)
    _close_at_exit(run, undo)
    if settings.exact:
        undo.enter_context(named_once(lambda text: events.emit(Said(text))))
    undo.enter_context(handled(run.signals))
    return run


def _status(place: Place, overrides: Overrides) -> StatusWriter | NoStatus:
    """This worker's row on the launcher's page, from now on; the run lets go of it."""
    if overrides.status_fd is None or place.slot is None:
        return Waiting(place.world) if place.world.size > 1 else NoStatus()
    return StatusWriter(overrides.status_fd, place.slot)


def _recovery(
    membership: Membership,
    door: Door,
    opener: Opener,
    wire: Wire,
    run: Run,
    find_members: Callable[[], tuple[Member, ...]],
) -> Recovery:
    return Recovery(membership, door, opener, wire, run.continuity.hand_over, find_members)


def _make_copyable(run: Run, place: Place, overrides: Overrides, settings: Settings, undo: ExitStack) -> None:
    """The launcher may ask this worker for a copy of itself. See Note [Replacement by a copy] in control.py."""
    recovery = run.continuity.recovery
    if overrides.control_fd is None or recovery is None or settings.device.type != "cpu" or settings.threads > 1:
        return
    copier = run.continuity.may_be_copied(Control(overrides.control_fd), lambda: {place.port, *recovery.ports})
    undo.callback(copier.close)


def no_members() -> tuple[Member, ...]:
    """A founder is a member itself as long as it lives."""
    raise AssertionError("a member looked for members")


def _can_recover(settings: Settings, place: Place) -> bool:
    """Not alone, where nobody comes; and not under torchrun, whose agent ends all workers when one is lost."""
    alone = place.world.size == 1 and place.slot is None
    return settings.recover and not alone and place.launcher != "torchrun"


def _charter(settings: Settings) -> dict[str, Any]:
    """What is told to newcomers, and must hold for them too."""
    return {
        "lanes": settings.assignment.num_lanes,
        "assignment": None if settings.by_hand is None else [list(lanes) for lanes in settings.by_hand],
        "seed": settings.seed,
        "threads": settings.threads,
        "exact": settings.exact,
        "bucket_bytes": settings.bucket_bytes,
        "wire": settings.wire,
        "algorithm": settings.algorithm,
        "not_finite": settings.not_finite,
        "drift_every": settings.drift_every,
        "noise_every": settings.noise_every,
        "reduce_dtype": str(settings.reduce_dtype),
        "flat": settings.flat,
        "num_founders": settings.num_founders,
        "run": active.num_before(),
        **_versions(),
        **hardware(settings.device),
    }


def _leave_unless_same(run: int) -> None:
    """See Note [Several runs of one script] in active.py."""
    if run != active.num_before():
        print(
            f"  note: a worker cannot join: the others are in run {run + 1} of the script (lockstep.start() was called "
            "as often), and it is in another. They go on without it.",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(0)


def _refuse_difference(theirs: dict[str, Any], mine: dict[str, Any], place: Place) -> None:
    for name, value in mine.items():
        if theirs[name] != value:
            raise Disagreement(name, place.world.rank, str(value), 0, str(theirs[name]))


def _with_device(
    settings: Settings, asked: Asked, overrides: Overrides, local_rank: int, num_founders: int
) -> Settings:
    """The same settings, with this worker's device. See Note [Neighbours share a GPU] in device.py."""
    wanted = overrides.device or asked.device
    device = choose(wanted, local_rank, num_founders, 0 if wanted == "cpu" else count_gpus())
    return replace(settings, device=device, num_founders=num_founders)


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
        "not_finite": settings.not_finite,
        "drift_every": settings.drift_every,
        "noise_every": settings.noise_every,
        "reduce_dtype": str(settings.reduce_dtype),
        "flat": settings.flat,
        **_versions(),
        **hardware(settings.device),
    }
    Agreement(wire.transport, Proposal(facts)).check()


def _versions() -> dict[str, str]:
    """The software of this worker, as far as it can be told in a few words."""
    return {
        "version of lockstep": VERSION,
        "version of torch": torch.__version__,
        "version of Python": platform.python_version(),
        "digest of the script": _script_digest(),
    }


def _script_digest() -> str:
    """Of the script's own file; its imports are not looked at."""
    try:
        return hashlib.blake2b(Path(sys.argv[0]).read_bytes(), digest_size=8).hexdigest()
    except OSError:  # an interactive session, or a module
        return "unknown"


def _device_in_words(asked: Asked, overrides: Overrides, settings: Settings) -> str:
    if settings.device.type == "cpu":
        return ""
    shared = sharing(overrides.device or asked.device, settings.num_founders, count_gpus())
    return in_words(shared, gpu_name(settings.device))


def _started(place: Place, settings: Settings, wire: Wire, device: str) -> Started:
    return Started(
        script=Path(sys.argv[0]).name or "python",
        num_workers=place.world.size,
        num_lanes=settings.assignment.num_lanes,
        seed=settings.seed,
        threads=settings.threads,
        exact=settings.exact,
        device=device,
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

    def note_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        run.failed = True
        advise(error)
        before(kind, error, trace)

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
