"""What the script and the command line ask of a run, checked and settled once."""

import os
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch

from lockstep.errors import BadArgument
from lockstep.lanes import Assignment
from lockstep.settings.device import CPU
from lockstep.settings.environment import Overrides, first_given, parse_device
from lockstep.settings.limits import MOST_BYTES, MOST_LANES, MOST_SEED, MOST_STEPS, MOST_THREADS
from lockstep.world import World

WIRES = ("shared", "hierarchical", "gloo")
"""Buckets in shared memory, for workers of one host; on two levels, for several hosts; or sent by Gloo."""

GPU_WIRES = ("gpu", "nccl")
"""Buckets in GPU memory that workers of one host open to each other; or by NCCL, which wants a GPU for each worker."""

BETWEEN_GPUS = "cuda"
"""One of these, as the GPUs of the workers are: what is chosen where nothing is asked for."""

Policy = Literal["keep", "skip", "stop"]

NOT_FINITE = get_args(Policy)
"""What to do with a step in which a gradient has NaN or infinity."""

ALGORITHMS = ("direct", "oneshot")
"""How buckets are sent between hosts, in the brackets of the lane tree."""

USUAL_TIMEOUT_S = 600.0
WATCHED_TIMEOUT_S = 24 * 3600.0
"""Where `lockstep run` watches the workers."""
MOST_TIMEOUT_S = 366 * 24 * 3600.0

MANY_LANES = 4
"""From so many lanes of one worker on, a GPU is likely to wait for the host."""

AGREED = (
    "seed", "threads", "exact", "bucket_bytes", "wire", "algorithm",
    "not_finite", "drift_every", "noise_every", "strategy", "rebalance",
)  # fmt: skip
"""Settings that must be equal on all workers, besides the lanes."""

REDUCE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""In what gradients may be added up."""


@dataclass(frozen=True)
class Options:
    """What `lockstep.start(...)` was given."""

    lanes: int | None = None
    seed: int | None = None
    exact: bool = True
    threads: int | None = None
    assignment: tuple[tuple[int, ...], ...] | None = None
    bucket_bytes: int | None = None
    wire: str | None = None
    algorithm: str | None = None
    timeout_s: float | None = None
    recover: bool | None = None
    not_finite: str = "keep"
    drift_every: int = 100
    noise_every: int = 200
    reduce_dtype: torch.dtype | str | None = None
    device: str | None = None
    strategy: str = "replicated"
    rebalance: bool = True

    def __post_init__(self) -> None:
        _whole("lanes", self.lanes, at_least=1, at_most=MOST_LANES)
        _whole("seed", self.seed, at_least=0, at_most=MOST_SEED)
        _whole("threads", self.threads, at_least=1, at_most=MOST_THREADS)
        _whole("bucket_bytes", self.bucket_bytes, at_least=1, at_most=MOST_BYTES)
        _one_of("wire", self.wire, (*WIRES, *GPU_WIRES))
        _one_of("algorithm", self.algorithm, ALGORITHMS)
        _whole("drift_every", self.drift_every, at_least=0, at_most=MOST_STEPS)
        _whole("noise_every", self.noise_every, at_least=0, at_most=MOST_STEPS)
        _reduce_dtype(self.reduce_dtype)
        _device(self.device)
        if self.not_finite not in NOT_FINITE:
            raise BadArgument(f"not_finite must be one of {', '.join(map(repr, NOT_FINITE))}, not {self.not_finite!r}")
        for name in ("exact", "recover", "rebalance"):
            if not isinstance(getattr(self, name), bool) and (name, getattr(self, name)) != ("recover", None):
                raise BadArgument(f"{name} must be True or False, not {getattr(self, name)!r}")
        number = isinstance(self.timeout_s, int | float)
        if self.timeout_s is not None and not (number and 0 < self.timeout_s <= MOST_TIMEOUT_S):
            given = _brief(self.timeout_s)
            raise BadArgument(f"timeout_s must be a positive number of seconds, a year's at most, not {given}")


@dataclass(frozen=True)
class Settings:
    """What holds for this run. `lanes_given` and `seed_given`: the script or the command line names them."""

    assignment: Assignment
    seed: int
    threads: int
    exact: bool
    timeout_s: float = USUAL_TIMEOUT_S
    bucket_bytes: int | None = None
    wire: str = "gloo"
    algorithm: str | None = None
    by_hand: tuple[tuple[int, ...], ...] | None = None
    """The lanes of each slot, if somebody has given them out; where workers come and go, as far as it can be kept."""
    lanes_given: bool = False
    seed_given: bool = False
    stop_after: int | None = None
    recover: bool = True
    not_finite: Policy = "keep"
    drift_every: int = 100
    noise_every: int = 200
    reduce_dtype: torch.dtype | None = None
    device: torch.device = CPU
    num_founders: int = 1
    """How many workers this host had at the start. See Note [Neighbours share a GPU] in device.py."""
    notes: tuple[str, ...] = ()
    strategy: str = "replicated"
    rebalance: bool = True
    """Whether lanes move away from a slow worker."""

    def facts(self) -> dict[str, Any]:
        """What must be equal on all workers: at the start, and for one that joins. JSON values."""
        return {
            "lanes": self.assignment.num_lanes,
            "assignment": None if self.by_hand is None else [list(lanes) for lanes in self.by_hand],
            "reduce_dtype": str(self.reduce_dtype),
            **{name: getattr(self, name) for name in AGREED},
        }


def resolve(options: Options, overrides: Overrides, world: World) -> Settings:
    """The command line goes over the script; what nobody gave has a default, the same on every worker.

    # Note [One thread unless asked]
    # The number of intra-op threads changes the bits of a matrix product, so it must not follow from the number of
    # workers or cores: it is 1 until somebody asks for more.
    """
    lanes = first_given(overrides.lanes, options.lanes)
    seed = first_given(overrides.seed, options.seed)
    by_hand = first_given(overrides.assignment, options.assignment)
    assignment = _assignment(by_hand, lanes, world)
    return Settings(
        assignment=assignment,
        by_hand=by_hand,
        seed=0 if seed is None else seed,
        threads=first_given(overrides.threads, options.threads, overrides.usual_threads) or 1,
        exact=options.exact,
        timeout_s=_timeout_s(options, overrides),
        bucket_bytes=options.bucket_bytes,
        wire=_wire(options, world),
        algorithm=options.algorithm,
        lanes_given=lanes is not None or by_hand is not None,
        seed_given=seed is not None,
        stop_after=overrides.stop_after,
        recover=options.recover is not False,
        not_finite=check_policy(options.not_finite),
        drift_every=options.drift_every,
        noise_every=options.noise_every,
        reduce_dtype=_reduce_dtype(options.reduce_dtype),
        notes=(*_notes(options, overrides), *_idle_note(assignment)),
        strategy=overrides.strategy or options.strategy,
        rebalance=options.rebalance if overrides.rebalance is None else overrides.rebalance,
    )


def check_policy(policy: str) -> Policy:
    """Refuses a policy that does not exist."""
    if policy not in get_args(Policy):
        raise BadArgument(f"{policy!r} says nothing about gradients that are not finite: use 'keep', 'skip' or 'stop'.")
    return cast(Policy, policy)


def _timeout_s(options: Options, overrides: Overrides) -> float:
    """A launcher that watches its workers knows better than a clock who hangs, and ends it."""
    if options.timeout_s is not None:
        return float(options.timeout_s)
    return USUAL_TIMEOUT_S if overrides.status_fd is None else WATCHED_TIMEOUT_S


def _assignment(explicit: tuple[tuple[int, ...], ...] | None, lanes: int | None, world: World) -> Assignment:
    if explicit is None:
        return Assignment.even(world.size if lanes is None else lanes, world.size)
    assignment = Assignment.explicit(explicit)
    if assignment.num_workers != world.size:
        raise BadArgument(
            f"the assignment names {assignment.num_workers} workers, but there are {world.size}: "
            "give one list of lanes for each"
        )
    if lanes is not None and assignment.num_lanes != lanes:
        raise BadArgument(f"the assignment carries {assignment.num_lanes} lanes, but lanes={lanes}")
    return assignment


def _wire(options: Options, world: World) -> str:
    """Shared memory wherever it is. Between hosts, `exact=False` leaves the sum to Gloo."""
    linux = hasattr(os, "memfd_create")
    if options.wire in GPU_WIRES:
        return options.wire
    if options.wire == "shared" and not (linux and world.on_one_host):
        raise BadArgument('wire="shared" needs Linux and all workers on one host; leave it out, or say wire="gloo"')
    if options.wire == "hierarchical" and not linux:
        raise BadArgument('wire="hierarchical" needs Linux; leave it out, or say wire="gloo"')
    chosen = options.wire or _usual_wire(options.exact, world, linux)
    if chosen == "shared" and options.algorithm is not None and world.size > 1:
        raise BadArgument(
            f"algorithm={options.algorithm!r} says how buckets are sent, and in shared memory nothing is: leave it "
            'out, or say wire="gloo"'
        )
    return chosen


def wire_on(device: torch.device, asked: str | None, algorithm: str | None, usual: str, world: World) -> str:
    """The wire for workers that compute on `device`: `usual` is that of the CPU."""
    if (device.type == "cuda") != (asked in GPU_WIRES) and asked is not None:
        allowed = GPU_WIRES if device.type == "cuda" else WIRES
        raise BadArgument(
            f"wire={asked!r} cannot be had on {device.type}: leave it out, or say {' or '.join(map(repr, allowed))}"
        )
    if device.type == "cuda" and algorithm is not None:
        raise BadArgument(f"algorithm={algorithm!r} says how buckets are sent between CPUs: leave it out on a GPU")
    if asked == "gpu" and not world.on_one_host:
        raise BadArgument('wire="gpu" needs all workers on one host; leave it out, or say wire="nccl"')
    return usual if device.type == "cpu" or asked is not None else BETWEEN_GPUS


def _usual_wire(exact: bool, world: World, linux: bool) -> str:
    if not linux:
        return "gloo"
    if world.on_one_host:
        return "shared"
    return "hierarchical" if exact else "gloo"


def _notes(options: Options, overrides: Overrides) -> list[str]:
    notes = []
    for name in ("lanes", "seed", "threads", "device", "strategy"):
        script, line = getattr(options, name), getattr(overrides, name)
        if script is not None and line is not None and script != line:
            notes.append(f"{name} {line} from the command line, not {script} from the script")
    if not options.exact:
        notes.append("exact=False: results may differ from run to run and between numbers of workers")
    return notes


def _idle_note(assignment: Assignment) -> list[str]:
    """Where some workers carry no lane."""
    idle = sum(not lanes for lanes in assignment.lanes_of)
    if not idle:
        return []
    who = f"{idle} of {assignment.num_workers} workers {'idles' if idle == 1 else 'idle'}"
    lanes = f"{assignment.num_lanes} lane{'' if assignment.num_lanes == 1 else 's'}"
    return [
        f"{who}: with {lanes}, a worker without one computes nothing until another is lost. A name that only the body "
        "of a loop over lanes assigns (`loss`) is not defined there"
    ]


def lanes_note(device: torch.device, assignment: Assignment) -> list[str]:
    """Where a worker computes many lanes one after the other on a GPU."""
    most = max(map(len, assignment.lanes_of), default=0)
    if device.type != "cuda" or most < MANY_LANES:
        return []
    return [
        f"a worker computes {most} lanes one after the other: if they are small, its GPU waits for Python. "
        "run.captured computes a lane without it, and fewer lanes are larger ones"
    ]


def _reduce_dtype(value: object) -> torch.dtype | None:
    if value is None or (isinstance(value, torch.dtype) and value in REDUCE_DTYPES.values()):
        return value
    if isinstance(value, str) and value in REDUCE_DTYPES:
        return REDUCE_DTYPES[value]
    names = ", ".join(f"torch.{name}" for name in REDUCE_DTYPES)
    raise BadArgument(f"reduce_dtype must be one of {names}, or None for that of each parameter, not {value!r}")


def _device(value: str | None) -> None:
    try:
        if value is not None:
            parse_device(value)
    except ValueError as error:
        raise BadArgument(f"device {error}") from None


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in (None, *allowed):
        raise BadArgument(f"{name} must be one of {', '.join(map(repr, allowed))}, or None to choose, not {value!r}")


def _whole(name: str, value: object, at_least: int, at_most: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadArgument(f"{name} must be a whole number, not {value!r:.60}")
    if value < at_least:
        raise BadArgument(f"{name} must be at least {at_least}, not {_brief(value)}")
    if value > at_most:
        raise BadArgument(f"{name} must be at most {at_most}, not {_brief(value)}")


def _brief(value: object) -> str:
    """The value in few words: Python does not write down numbers of several thousand digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return f"{value!r:.60}"
