"""What a step benchmark on a GPU measures, and the report that it makes from the times. Without torch."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from lockstep.errors import BadArgument
from lockstep.launch.supervision.messages import count
from lockstep.programs.bench import plan as bench
from lockstep.programs.bench.plan import CUDA, ReferenceModel
from lockstep.programs.bench.report import Times, ratios, spread, spread_cell
from lockstep.programs.packages import require
from lockstep.programs.tables import Columns, show_notes, show_table
from lockstep.settings.environment import STRATEGIES

if TYPE_CHECKING:
    from rich.console import Console

PLAIN, FUSED, DETERMINISTIC = "plain", "plain fused", "plain deterministic"
DDP, DDP_DETERMINISTIC, DDP_GLOO = "ddp", "ddp deterministic", "ddp gloo"
ZERO, FSDP = "ddp zero", "fsdp2"
COMPILED, REDUCED = "compile", "compile reduce-overhead"
BY_HAND = "graph by hand"
DDP_COMPILED, COMPILED_DETERMINISTIC = "ddp compile", "compile deterministic"
ACCUMULATED, ACCUMULATED_COMPILED = "accumulation", "accumulation compile"
LOCKSTEP, NOT_EXACT = "lockstep", "lockstep exact=False"
CAPTURED = "lockstep captured"
LOCKSTEP_COMPILED, NOT_EXACT_COMPILED = "lockstep compile", "exact=False compile"
CAPTURED_COMPILED = "captured compile"
REPLICATED, *_SHARDED = STRATEGIES
SHARDED = tuple(f"{LOCKSTEP} {strategy}" for strategy in _SHARDED)

UNSHARDED = (LOCKSTEP, NOT_EXACT, CAPTURED, LOCKSTEP_COMPILED, NOT_EXACT_COMPILED, CAPTURED_COMPILED)
OF_LOCKSTEP = (*UNSHARDED, *SHARDED)
SIDES = (
    PLAIN, FUSED, DETERMINISTIC, DDP, DDP_DETERMINISTIC, COMPILED, COMPILED_DETERMINISTIC, DDP_COMPILED, REDUCED,
    BY_HAND, *UNSHARDED,
)  # fmt: skip
"""The ways to train on one worker. The words of a name say what a side does: see `does`."""

OF_LANES = (ACCUMULATED, ACCUMULATED_COMPILED)
"""What lanes are held against where a worker carries several: a plain loop over as many parts of a batch."""

DIVIDED = (ZERO, FSDP, *SHARDED)
"""What divides an update among workers: torch's ways, and lockstep's. One worker alone has nothing to divide."""

SIDES_OF_SEVERAL = (DDP_GLOO, DDP, LOCKSTEP, NOT_EXACT, CAPTURED, LOCKSTEP_COMPILED, *DIVIDED)  # on several workers
USUAL_OF_SEVERAL = (DDP_GLOO, LOCKSTEP, CAPTURED)
"""Where workers share a GPU: NCCL refuses them, so "ddp", "ddp zero" and "fsdp2" are not among these."""

USUAL_BY_NCCL = (DDP, LOCKSTEP, NOT_EXACT, CAPTURED)
SHARING_BY_NCCL = (*USUAL_BY_NCCL, *DIVIDED)
"""The sides that add by NCCL where each worker is a host of its own to it (`--ranks-share-gpu`)."""

REFERENCES_IN_ORDER = (FUSED, DDP_GLOO, DDP)  # the others are compared with the first of them that is there
NEEDS_CUDA = (REDUCED, BY_HAND, CAPTURED, CAPTURED_COMPILED)  # sides that are CUDA graphs, and nothing else
GPU_REFERENCES = {
    "mlp": ReferenceModel(64, steps=100),
    "gpt10m": ReferenceModel(16, steps=20),
    "gpt124m": ReferenceModel(16, steps=4),
    "resnet50": ReferenceModel(128, steps=4, package="torchvision"),
    "vit": ReferenceModel(64, steps=4, package="torchvision"),
}

ROUNDS = 8


def does(side: str, word: str) -> bool:
    """Whether the side's name has the word: "compile", "captured", "deterministic", "ddp", a strategy."""
    return word in side.split()


def strategy_of(side: str) -> str:
    return next((strategy for strategy in STRATEGIES if does(side, strategy)), REPLICATED)


@dataclass(frozen=True)
class GpuStepPlan(bench.BenchRecord):
    """One model on one number of workers. `sizes` are arguments of the workload, if it is not at its reference size.

    `lanes` are those of each worker. `ranks_share_gpu`: workers on one GPU add by NCCL, as hosts of their own to it.
    """

    model: str
    workers: int
    sides: tuple[str, ...]
    steps: int
    rounds: int
    device: str = CUDA
    sizes: dict[str, int] = field(default_factory=dict, hash=False)
    lanes: int = 1
    ranks_share_gpu: bool = False

    def __post_init__(self) -> None:
        allowed = _sides_on(self.workers, self.lanes, self.ranks_share_gpu)
        odd = [side for side in self.sides if side not in allowed]
        if odd:
            where = count(self.workers, "worker")
            raise BadArgument(f"{', '.join(odd)} cannot be measured on {where}: choose from {', '.join(allowed)}")
        divisor = f"a number of workers that divides {self.batch_size}"
        bench.refuse_unequal_shares(self.model, self.batch_size, self.workers, divisor)

    @property
    def batch_size(self) -> int:
        return self.sizes.get("batch_size", GPU_REFERENCES[self.model].batch_size)

    @property
    def title(self) -> str:
        return f"{self.model} on {_where(self.workers, self.lanes)}, {self.device}"

    @property
    def ddp(self) -> str:
        """The baseline among the sides that is data parallel."""
        return DDP_GLOO if DDP_GLOO in self.sides else DDP


def make_plans(
    models: Sequence[str], workers: Sequence[int], sides: Sequence[str] | None = None, lanes: Sequence[int] = (1,),
    *, steps: int | None = None, rounds: int = ROUNDS, ranks_share_gpu: bool = False, strategy: str = REPLICATED,
    num_gpus: int = 1,
) -> tuple[GpuStepPlan, ...]:  # fmt: skip
    """A plan for every model on every number of workers and of lanes, each once; raises before anything runs."""
    if strategy != REPLICATED and sides:
        raise BadArgument(
            f"--strategy chooses the sides, and --sides names them: leave --strategy {strategy} out, and name the side "
            f"{LOCKSTEP} {strategy} in --sides"
        )
    if strategy != REPLICATED and 1 in workers:
        raise BadArgument(f"one worker updates as without sharding: take -n 2 or more for --strategy {strategy}")

    plans = []
    names = bench.models_named(models, GPU_REFERENCES, "on a GPU")
    for model, number, each in product(names, dict.fromkeys(workers), dict.fromkeys(lanes)):
        by_nccl = ranks_share_gpu or number <= num_gpus
        chosen = tuple(dict.fromkeys(sides or _usual_sides(number, each, by_nccl, strategy)))
        block = steps or GPU_REFERENCES[model].steps
        plans.append(GpuStepPlan(model, number, chosen, block, rounds, lanes=each, ranks_share_gpu=ranks_share_gpu))
    return tuple(plans)


def _usual_sides(workers: int, lanes: int, by_nccl: bool, strategy: str) -> tuple[str, ...]:
    """`by_nccl`: NCCL takes the workers, because each has a GPU of its own, or says that it is a host of its own."""
    if strategy != REPLICATED:
        baselines = (DDP, ZERO, FSDP) if by_nccl else (DDP_GLOO,)
        return (*baselines, LOCKSTEP, f"{LOCKSTEP} {strategy}")
    if workers == 1:
        return _sides_on(workers, lanes, False)
    return USUAL_BY_NCCL if by_nccl else USUAL_OF_SEVERAL


def _sides_on(workers: int, lanes: int, ranks_share_gpu: bool) -> tuple[str, ...]:
    if workers > 1:
        return SHARING_BY_NCCL if ranks_share_gpu else SIDES_OF_SEVERAL
    return SIDES if lanes == 1 else (*SIDES, *OF_LANES)


def _where(workers: int, lanes: int) -> str:
    return count(workers, "worker") if lanes == 1 else f"{count(workers, 'worker')}, {lanes} lanes each"


def require_packages(plans: Sequence[GpuStepPlan]) -> None:
    """Raises if a model comes from a package that is not installed."""
    for plan in plans:
        if package := GPU_REFERENCES[plan.model].package:
            require(package, plan.model)


def parse_sides(text: str) -> tuple[str, ...]:
    """Names of sides with commas between them, in the order they are given."""
    names = tuple(" ".join(word.split()) for word in text.split(","))
    known = tuple(dict.fromkeys((*SIDES, *OF_LANES, *SIDES_OF_SEVERAL)))
    for name in names:
        if name not in known:
            raise BadArgument(f"there is no side {name!r}: choose from {', '.join(known)}")
    return names


def drawn_order(round_number: int, sides: Sequence[str]) -> list[str]:
    """The sides in the order of one round, drawn by lot: no side always follows the same neighbour."""
    return random.Random(round_number).sample(list(sides), len(sides))


def reference_among(sides: Sequence[str]) -> str:
    return next((side for side in REFERENCES_IN_ORDER if side in sides), sides[0])


# -- claims -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpeedClaim:
    """`side` takes at most `most` times as long as `base`; `model`: on this one alone."""

    side: str
    base: str
    most: float
    model: str | None = None

    @property
    def text(self) -> str:
        if self.most == 1:
            return f"{self.side} is not slower than {self.base}"
        if self.most < 1:
            return f"{self.side} is {1 / self.most:g} times as fast as {self.base}"
        return f"{self.side} is within {100 * (self.most - 1):g} % of {self.base}"

    def checked(self, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """The median of the ratios within rounds decides; `holds` is None where a side was not timed."""
        ratio = spread("ratio", ratios(seconds.get(self.side), seconds.get(self.base)))["ratio"]
        holds = None if ratio is None else ratio <= self.most
        return {"claim": self.text, "most": self.most, "ratio": ratio, "holds": holds}


CLAIMS = (
    SpeedClaim(LOCKSTEP, DETERMINISTIC, 1.01),
    SpeedClaim(NOT_EXACT, FUSED, 1.01),
    SpeedClaim(LOCKSTEP, DDP_DETERMINISTIC, 1.0),
    SpeedClaim(LOCKSTEP, DDP, 1.0),
    SpeedClaim(NOT_EXACT, DDP, 1.0),
    SpeedClaim(CAPTURED, DDP, 0.25, model="gpt10m"),
    SpeedClaim(CAPTURED, BY_HAND, 1.05),
    SpeedClaim(LOCKSTEP_COMPILED, DDP_COMPILED, 1.0),
    SpeedClaim(NOT_EXACT_COMPILED, COMPILED, 1.01),
    SpeedClaim(LOCKSTEP_COMPILED, COMPILED_DETERMINISTIC, 1.01),
)
CLAIMS_OF_LANES = (
    SpeedClaim(LOCKSTEP, ACCUMULATED, 1.02),
    SpeedClaim(LOCKSTEP_COMPILED, ACCUMULATED_COMPILED, 1.02),
    SpeedClaim(CAPTURED_COMPILED, COMPILED, 1.2),
)
CLAIMS_OF_SEVERAL = (
    SpeedClaim(LOCKSTEP, DDP_GLOO, 1.0),
    SpeedClaim(CAPTURED, DDP_GLOO, 1.0),
    SpeedClaim(LOCKSTEP, DDP, 1.0),
)


def check_claims(plan: GpuStepPlan, seconds: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    alone = CLAIMS if plan.lanes == 1 else CLAIMS_OF_LANES
    every = alone if plan.workers == 1 else CLAIMS_OF_SEVERAL
    named = [claim for claim in every if {claim.side, claim.base} <= {*plan.sides}]
    return [claim.checked(seconds) for claim in named if claim.model in (None, plan.model)]


# -- the report -------------------------------------------------------------------------------------------------


@dataclass
class GpuOutcome:
    """The results of the sides. A side is in `seconds`, per step and round by round, or in `reasons` why it is not.

    `stopped`: Ctrl-C came after the first round, and `seconds` has the rounds that were whole.
    """

    reference: str | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    evidence: dict[str, dict[str, Any]] = field(default_factory=dict)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    peaks: dict[str, dict[str, int | None]] = field(default_factory=dict)
    parameters: int | None = None
    coarse: bool = False
    machine: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False


def make_row(plan: GpuStepPlan, outcome: GpuOutcome) -> dict[str, Any]:
    """One model on one number of workers: every side, and whether the claims hold."""
    asked = ("model", "workers", "lanes", "ranks_share_gpu", "device", "batch_size", "steps", "ddp")
    return {
        **{name: getattr(plan, name) for name in asked},
        "parameters": outcome.parameters,
        "rounds": max(map(len, outcome.seconds.values()), default=0),
        "reference": outcome.reference,
        "sides": [_side(name, plan, outcome) for name in plan.sides],
        "claims": check_claims(plan, outcome.seconds),
    }


def _side(name: str, plan: GpuStepPlan, outcome: GpuOutcome) -> dict[str, Any]:
    """A side's row; if it was not timed, times are null, and `reason` is why."""
    times: Times = [1000 * seconds for seconds in outcome.seconds.get(name, ())]
    bases = {"plain_fused": FUSED, "plain_deterministic": DETERMINISTIC, "ddp": plan.ddp}
    peaks, evidence = outcome.peaks.get(name, {}), outcome.evidence.get(name, {})
    # JSON has no infinity.
    finite = {kind: value for kind, value in evidence.items() if kind != "digest" and math.isfinite(value)}
    row = {
        "side": name,
        "reason": None if times else outcome.reasons.get(name, "failed: it was never timed"),
        **spread("ms", times),
        "peak_reserved_bytes": peaks.get("reserved_bytes"),
        "peak_allocated_bytes": peaks.get("allocated_bytes"),
        "host_bytes": peaks.get("host_bytes"),
        "gradients_apart": finite.get("gradients"),
        "movement_apart": finite.get("movement"),
        "movement_length": finite.get("length"),
        "digest": evidence.get("digest"),
        "remarks": outcome.remarks.get(name, []),
        "rounds_ms": times,
    }
    for word, base in bases.items():
        row |= spread(f"ratio_to_{word}", ratios(outcome.seconds.get(name), outcome.seconds.get(base)))
    return row


def make_report(rows: Sequence[dict[str, Any]], machine: dict[str, Any], mps: bool, stopped: bool) -> dict[str, Any]:
    """`stopped`: by Ctrl-C, so the last row may have fewer rounds than were asked for, and further rows are missing."""
    return {"bench": "step", "machine": machine, "mps": mps, "stopped": stopped, "rows": list(rows)}


def is_whole(report: dict[str, Any]) -> bool:
    return all(side["reason"] is None for row in report["rows"] for side in row["sides"])


def show_row(row: dict[str, Any], console: "Console") -> None:
    size = f"{(row['parameters'] or 0) / 1e6:.1f} M parameters, batch {row['batch_size']}"
    console.print(f"{row['model']}, {size}, {_where(row['workers'], row['lanes'])}", style="bold", highlight=False)
    show_table(_columns(row["ddp"], row["workers"]), row["sides"], console)
    for side in row["sides"]:
        reasons = [] if side["reason"] is None else [f"! {side['side']} {side['reason']}"]
        for line in (*reasons, *(f"! {side['side']}: {remark}" for remark in side["remarks"])):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for claim in row["claims"]:
        holds = {True: "yes", False: "no", None: "not measured"}[claim["holds"]]
        ratio = "" if claim["ratio"] is None else f" (ratio {claim['ratio']:.3f}, at most {claim['most']:g})"
        console.print(f"{claim['claim']}: {holds}{ratio}", highlight=False)
    console.print()


def _columns(ddp: str, workers: int) -> Columns:
    """A plain loop is on one worker alone, and several share the memory of the host."""
    plain: Columns = [("÷ plain fused", lambda side: spread_cell(side, "ratio_to_plain_fused", 3))]
    host: Columns = [("host GiB", lambda side: _number(side["host_bytes"] if side["ms"] else None, 2**30, ".1f"))]
    return (
        ("side", lambda side: side["side"]),
        ("ms", _ms_or_reason),
        *(plain if workers == 1 else ()),
        (f"÷ {ddp}", lambda side: spread_cell(side, "ratio_to_ddp", 3)),
        ("GiB", lambda side: _number(side["peak_reserved_bytes"] if side["ms"] else None, 2**30, ".1f")),
        *(host if workers > 1 else ()),
        ("apart", lambda side: _number(side["gradients_apart"], 1, ".0e")),
    )


def _ms_or_reason(side: dict[str, Any]) -> str:
    return side["reason"].partition(":")[0] if side["reason"] else spread_cell(side, "ms", 2 if side["ms"] < 100 else 1)


def _number(value: float | None, unit: int, form: str) -> str:
    return "" if value is None else f"{value / unit:{form}}"


def show_machine(report: dict[str, Any], console: "Console") -> None:
    """Prints the machine below all rows, if there are any."""
    machine = report["machine"]
    if not report["rows"]:
        return
    show_notes(
        "Milliseconds per step, medians over rounds (lowest–highest). Ratios, made within rounds, likewise.\n"
        "GiB: the most memory that a side's processes held. Apart: gradients, from the reference's.\n"
        f"{machine.get('gpu', 'no GPU')}, {machine.get('cores')} cores, torch {machine.get('torch')}, "
        f"CUDA {machine.get('cuda')}{', under MPS' if report['mps'] else ''}.",
        console,
    )
