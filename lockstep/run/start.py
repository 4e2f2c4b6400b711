"""`lockstep.start()`: finds the other workers, opens the wire, and makes the run."""

import atexit
import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch

from lockstep import strategies
from lockstep.chance import fold, set_generators
from lockstep.determinism.compiler import watched_compiler
from lockstep.determinism.cudnn_attention import front_end_note
from lockstep.determinism.hardware import gpu_name
from lockstep.determinism.operators import named_once
from lockstep.determinism.process import settle_process
from lockstep.elastic.entrance import Entrance, find_entrance
from lockstep.elastic.formation import Elasticity
from lockstep.elastic.founders import MemberDirectory, gather_founders
from lockstep.elastic.membership import Member, founded, joining
from lockstep.elastic.opener import WireOpener
from lockstep.elastic.recovery import Recovery
from lockstep.elastic.rendezvous import open_store
from lockstep.elastic.roster import RunIsOver
from lockstep.errors import BadArgument, BadEnvironment, advise, naming_lost_worker
from lockstep.events import Events, GraphCompiled, Started, Wait
from lockstep.launch.channels.control import Control
from lockstep.launch.channels.status import NoStatus, StatusReader, StatusWriter
from lockstep.run import active
from lockstep.run.context import Context
from lockstep.run.readers import subscribe_readers
from lockstep.run.run import Run
from lockstep.run.signals import handled
from lockstep.run.status_report import StatusReport
from lockstep.run.terms import agree, leave_unless_same, refuse_difference, terms
from lockstep.run.wait_watch import WaitWatch
from lockstep.settings.device import choose, count_gpus, in_words, sharing
from lockstep.settings.environment import (
    LaunchPlace,
    Overrides,
    find_place,
    nccl_host,
    process_environment,
    read_overrides,
    set_too_late,
    with_variable,
)
from lockstep.settings.environments.stop_signals import stop_signals
from lockstep.settings.options import BETWEEN_GPUS, Options, Settings, lanes_note, resolve, wire_on
from lockstep.state.progress import DataProgress
from lockstep.wire import Wire, WireOptions, in_process, open_wire
from lockstep.wire.choice import bucket_bytes as suitable_bucket_bytes
from lockstep.wire.generation import Generation
from lockstep.wire.network.deadline import do_nothing
from lockstep.world import World

NCCL_LEFT_TO_US = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""See Note [When NCCL waits for ever] in wire/cuda/nccl.py."""


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
    device: torch.device | str | None = None,
    strategy: strategies.Strategy | str | None = None,
    rebalance: bool = True,
) -> Run:
    """Collective. Starts this worker's part of a run, under `lockstep run`, torchrun, Slurm, MPI, or alone.

    `lanes` defaults to the number of workers, `seed` to 0, `threads` (per worker) to 1: they fix the bits, so they do
    not follow from the hardware. `assignment` gives each worker's lanes by hand. `exact=False` gives up equal
    bits for speed. `wire` is "shared" (memory) for workers of one host and "hierarchical" or "gloo" otherwise;
    on GPUs "nccl", or "gpu" (memory) where workers share one.
    `algorithm` ("direct", "oneshot") and `bucket_bytes` are chosen for the measured link unless given. `timeout_s` is
    how long a silent worker is waited for: 600, or as long as `lockstep run` bears it. `recover=False` ends the run
    when a worker is lost. `not_finite` says what becomes of a step whose gradient has NaN or infinity: "keep" it as it
    is, "skip" it, or "stop". In step 1 and every `drift_every` steps (0: never) the workers compare their states, and
    every `noise_every` steps the noise of the gradient is measured for `run.noise`. Gradients are added up in
    `reduce_dtype`, or in the dtype of their parameter.
    `device` is "cpu", "cuda" (each worker its own GPU, the default where there are any) or "cuda:K".
    `strategy` says what a step means: an object of `lockstep.strategies`, or its string form; "replicated" by default.
    `rebalance=False` leaves lanes where they are although a worker is slow.
    """
    active.refuse_second()
    chosen = _checked_strategy(strategy)
    options = Options(
        lanes, seed, exact, threads, _listed(assignment), bucket_bytes, wire, algorithm, timeout_s,
        recover, not_finite, drift_every, noise_every, reduce_dtype=reduce_dtype,
        device=str(device) if isinstance(device, torch.device) else device, strategy=str(chosen),
        rebalance=rebalance,
    )  # fmt: skip
    environ = process_environment()
    place, overrides = find_place(environ), read_overrides(environ).for_run(active.num_before())
    if active.has_changed():
        raise BadEnvironment(
            "workers have come or gone, or failed, in an earlier run of this script: a further one needs those that "
            "the first began with. Let each run have a script, or a process, of its own"
        )
    status, undo = _status(place, overrides), ExitStack()
    try:
        entrance = _entrance(place, overrides)
        if entrance.roster is not None:
            undo.callback(entrance.roster.close)
        enter = _found if entrance.directory is None else _join
        run = enter(options, chosen, entrance, overrides, status, undo)
    except BaseException:
        undo.close()
        if isinstance(status, WaitWatch):
            status.close()
        raise
    active.activate(run)
    return run


def _entrance(place: LaunchPlace, overrides: Overrides) -> Entrance:
    page = None if overrides.status_fd is None else StatusReader(overrides.status_fd)
    try:
        return find_entrance(place, page, active.num_before(), _say)
    except RunIsOver as over:
        _say(str(over))
        raise SystemExit(0) from over


def _found(
    options: Options,
    strategy: strategies.Strategy,
    entrance: Entrance,
    overrides: Overrides,
    status: StatusWriter | NoStatus,
    undo: ExitStack,
) -> Run:
    """Collective. A worker of the first generation."""
    place = entrance.place
    world = replace(place.world, generation=1)
    settings = _with_device(resolve(options, overrides, world), options, overrides, world.local_rank, world.local_size)
    settings = replace(
        settings,
        wire=wire_on(settings.device, options.wire, options.algorithm, settings.wire, world),
        notes=(*settings.notes, *_gpu_notes(settings), *_late_variables()),
    )
    context = _context(settings, strategy, overrides, status, place, undo)
    opener, can_recover = _opener(settings, world.on_one_host), _can_recover(settings, place)
    if entrance.roster is not None:
        _refuse_useless_roster(settings, place, can_recover)
    with context.events.waiting(Wait.START), naming_lost_worker(0, "lockstep.start"):
        store = open_store(place, settings.timeout_s, active.next_meeting(), _say) if world.size > 1 else None
        watch = do_nothing if can_recover else None
        opened = in_process(world) if store is None else open_wire(opener.options, world, store, watch)
        agree(opened, settings, entrance.has_witness)
    settings = _with_bucket_bytes(settings, opened)
    context = replace(context, settings=settings)
    slots, elasticity = tuple(range(world.size)), None
    if can_recover:
        endpoint = entrance.open_endpoint()
        with context.events.waiting(Wait.START), naming_lost_worker(0, "lockstep.start"):
            members = gather_founders(place, endpoint, store)
        slots = tuple(member.slot for member in members)
        recovery = Recovery(
            founded(endpoint.member, members), endpoint, opener, opened, terms(settings, entrance.has_witness),
            no_members, entrance.roster,
        )  # fmt: skip
        elasticity = Elasticity(recovery, False, _control(overrides, settings), place.port)
    run = _make_run(context, Generation(opened, slots, settings.assignment), elasticity, place)
    run.guard.formation.publish()
    _announce(context, place, opened, _device_in_words(options, overrides, settings, opened))
    return run


def _join(
    options: Options,
    strategy: strategies.Strategy,
    entrance: Entrance,
    overrides: Overrides,
    status: StatusWriter | NoStatus,
    undo: ExitStack,
) -> Run:
    """A worker that comes later: alone until it is admitted. See Note [Newcomers] in elastic/formation.py."""
    place, directory = entrance.place, entrance.directory
    assert directory is not None
    theirs = _terms_of(directory)
    leave_unless_same(theirs["run"])
    given = replace(overrides, lanes=theirs["lanes"], seed=theirs["seed"], threads=theirs["threads"], assignment=None)
    settings = replace(resolve(replace(options, assignment=None), given, World()), bucket_bytes=theirs["bucket_bytes"])
    by_hand = None if theirs["assignment"] is None else tuple(map(tuple, theirs["assignment"]))
    settings = replace(settings, wire=theirs["wire"], algorithm=theirs["algorithm"], by_hand=by_hand)
    slot = place.world.local_rank if place.slot is None else place.slot
    settings = _with_device(settings, options, overrides, slot, theirs["num_founders"])
    mine = terms(settings, entrance.has_witness)
    refuse_difference(theirs, mine, place)
    context = _context(settings, strategy, overrides, status, place, undo)
    wire, endpoint = in_process(World()), entrance.open_endpoint(fresh=True)
    opener = _opener(settings, place.world.on_one_host)
    recovery = Recovery(joining(endpoint.member)[0], endpoint, opener, wire, mine, directory.members, entrance.roster)
    elasticity = Elasticity(recovery, True, _control(overrides, settings), place.port)
    return _make_run(context, Generation(wire, (0,), settings.assignment), elasticity, place)


def _terms_of(directory: MemberDirectory) -> dict[str, Any]:
    try:
        return directory.terms()
    except RunIsOver as over:
        _say(str(over))
        raise SystemExit(0) from over


def _say(text: str) -> None:
    """Before anybody reads events, and from threads."""
    print(f"  note: {text}", file=sys.stderr, flush=True)


def _refuse_useless_roster(settings: Settings, place: LaunchPlace, can_recover: bool) -> None:
    if not can_recover:
        raise BadArgument("with a roster workers come and go, which recover=False refuses: leave it out, or the roster")
    if place.world.size == 1 and not settings.lanes_given:
        raise BadArgument(
            "a worker that founds a run alone, by a roster, cannot know how many will come: say lanes=N, at least as "
            "many as there will be workers"
        )


def _context(
    settings: Settings,
    strategy: strategies.Strategy,
    overrides: Overrides,
    status: StatusWriter | NoStatus,
    place: LaunchPlace,
    undo: ExitStack,
) -> Context:
    """Sets this process up for the run; `undo` puts it back."""
    undo.enter_context(settle_process(settings.threads, settings.exact, settings.device))
    if settings.wire in ("nccl", BETWEEN_GPUS):
        for variable in NCCL_LEFT_TO_US.items():
            undo.enter_context(with_variable(*variable))
    events = Events(worker=place.world.rank if place.slot is None else place.slot)
    progress = DataProgress()
    if isinstance(status, StatusWriter | WaitWatch):  # somebody reads it
        StatusReport(status, progress.waited_ns).read(events)
    if settings.strategy != str(strategy):  # the command line goes over the script
        strategy = strategies.parse(settings.strategy)
    return Context(settings, strategy, overrides, events, status, undo, progress)


def _opener(settings: Settings, on_one_host: bool) -> WireOpener:
    options = WireOptions(
        settings.wire,
        settings.timeout_s,
        settings.device,
        settings.exact,
        settings.algorithm,
        nccl_host(process_environment()),
    )
    return WireOpener(options, on_one_host)


def _make_run(context: Context, generation: Generation, elasticity: Elasticity | None, place: LaunchPlace) -> Run:
    events, undo = context.events, context.undo
    run = Run(context, generation, elasticity)
    if isinstance(context.status, WaitWatch):
        context.status.watch(lambda: run.guard.generation.wire, context.settings.timeout_s)
    subscribe_readers(run, context, place)
    _close_at_exit(run, undo)
    if context.settings.exact:
        undo.enter_context(named_once(partial(_note_inexact, run, events)))
        undo.enter_context(watched_compiler(events.note, lambda text: events.emit(GraphCompiled, text)))
    asked = stop_signals(process_environment(), place.launcher)
    undo.enter_context(handled(run.guard.signals, asked, events.note))
    set_generators(fold(context.settings.seed, "outside"))
    return run


def _note_inexact(run: Run, events: Events, text: str) -> None:
    """An operator has no deterministic kernel."""
    run.trail.give_up()
    events.note(text)


def _status(place: LaunchPlace, overrides: Overrides) -> StatusWriter | NoStatus:
    """This worker's row on the launcher's page, from now on; the run lets go of it."""
    if overrides.status_fd is None or place.slot is None:
        return WaitWatch(place.world) if place.world.size > 1 or place.roster else NoStatus()
    return StatusWriter(overrides.status_fd, place.slot)


def _control(overrides: Overrides, settings: Settings) -> Control | None:
    """How the launcher asks this worker for a copy of itself. See Note [Replacement by a copy] in control.py."""
    if overrides.control_fd is None or settings.device.type != "cpu" or settings.threads > 1:
        return None
    os.set_inheritable(overrides.control_fd, False)
    return Control(os.dup(overrides.control_fd))  # a further run of the script needs it again


def no_members() -> tuple[Member, ...]:
    """A founder is a member itself as long as it lives."""
    raise AssertionError("a member looked for members")


def _gpu_notes(settings: Settings) -> list[str]:
    attention = front_end_note() if settings.exact and settings.device.type == "cuda" else []
    return [*lanes_note(settings.device, settings.assignment), *attention]


def _late_variables() -> list[str]:
    """See Note [Loaded once] in launch/worker/load_once.py."""
    names = set_too_late(process_environment())
    if not names:
        return []
    return [
        f"the script has set {', '.join(names)} after torch was loaded, which may be too late: set it in the shell, or "
        "start with --no-load-once"
    ]


def _can_recover(settings: Settings, place: LaunchPlace) -> bool:
    """Not alone, where nobody comes; and not under torchrun, whose agent ends all workers when one is lost."""
    alone = place.world.size == 1 and place.slot is None
    return settings.recover and not alone and place.launcher != "torchrun"


def _with_device(
    settings: Settings, options: Options, overrides: Overrides, local_rank: int, num_founders: int
) -> Settings:
    """The same settings, with this worker's device. See Note [Neighbours share a GPU] in device.py."""
    wanted = overrides.device or options.device
    device = choose(wanted, local_rank, num_founders, 0 if wanted == "cpu" else count_gpus())
    return replace(settings, device=device, num_founders=num_founders)


def _with_bucket_bytes(settings: Settings, wire: Wire) -> Settings:
    """The same settings, with buckets of a size that suits the link; the user's own word goes first."""
    if settings.bucket_bytes is not None or wire.link is None:
        return settings
    return replace(settings, bucket_bytes=suitable_bucket_bytes(wire.link, wire.world.size))


def _checked_strategy(strategy: object) -> strategies.Strategy:
    if strategy is None or isinstance(strategy, str):
        return strategies.parse("replicated" if strategy is None else strategy)
    if not callable(getattr(strategy, "engine", None)):
        raise BadArgument(f"strategy takes an object of lockstep.strategies, or its string form, not {strategy!r:.60}")
    return cast(strategies.Strategy, strategy)


def _device_in_words(options: Options, overrides: Overrides, settings: Settings, wire: Wire) -> str:
    if settings.device.type == "cpu":
        return ""
    shared = sharing(overrides.device or options.device, settings.num_founders, count_gpus())
    if not wire.shares_gpus:  # a launcher may show each worker a GPU of its own under one name
        shared = dict.fromkeys(shared, 1)
    return in_words(shared, gpu_name(settings.device))


def _announce(context: Context, place: LaunchPlace, wire: Wire, device: str) -> None:
    settings = context.settings
    context.events.emit(
        Started,
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
