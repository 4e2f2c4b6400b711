"""What a step benchmark on a GPU measures, and the report that it makes from the times. Without torch."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.errors import BadArgument
from lockstep.programs.bench.plan import (
    CUDA,
    BenchRecord,
    ReferenceModel,
    count_of,
    models_named,
    refuse_unequal_shares,
)
from lockstep.programs.bench.spread import Times, ratios, spread
from lockstep.programs.bench.table import Columns, show_notes, show_table, spread_cell
from lockstep.programs.packages import require

if TYPE_CHECKING:
    from rich.console import Console

PLAIN, FUSED, DETERMINISTIC = "plain", "plain fused", "plain deterministic"
DDP, DDP_DETERMINISTIC, DDP_GLOO = "ddp", "ddp deterministic", "ddp gloo"
COMPILED, REDUCED = "compile", "compile reduce-overhead"
BY_HAND = "graph by hand"
DDP_COMPILED, COMPILED_DETERMINISTIC = "ddp compile", "compile deterministic"
ACCUMULATED, ACCUMULATED_COMPILED = "accumulation", "accumulation compile"
LOCKSTEP, NOT_EXACT = "lockstep", "lockstep exact=False"
CAPTURED = "lockstep captured"
LOCKSTEP_COMPILED, NOT_EXACT_COMPILED = "lockstep compile", "exact=False compile"
CAPTURED_COMPILED = "captured compile"

SIDES = (
    PLAIN, FUSED, DETERMINISTIC, DDP, DDP_DETERMINISTIC, COMPILED, COMPILED_DETERMINISTIC, DDP_COMPILED, REDUCED,
    BY_HAND, LOCKSTEP, NOT_EXACT, CAPTURED, LOCKSTEP_COMPILED, NOT_EXACT_COMPILED, CAPTURED_COMPILED,
)  # fmt: skip
"""The ways to train on one worker."""

OF_LANES = (ACCUMULATED, ACCUMULATED_COMPILED)
"""What lanes are held against where a worker carries several: a plain loop over as many parts of a batch."""

SIDES_OF_SEVERAL = (DDP_GLOO, DDP, LOCKSTEP, NOT_EXACT, CAPTURED, LOCKSTEP_COMPILED)  # to train on several workers
USUAL_OF_SEVERAL = (DDP_GLOO, LOCKSTEP, CAPTURED)
"""NCCL refuses workers that share a GPU: "ddp", which is DDP over NCCL, is measured only where it is asked for."""

SHARING_BY_NCCL = (DDP, LOCKSTEP, NOT_EXACT, CAPTURED)
"""Those of them that add by NCCL where each worker is a host of its own to it (`--ranks-share-gpu`)."""

COMPILING = (
    COMPILED, COMPILED_DETERMINISTIC, DDP_COMPILED, REDUCED, ACCUMULATED_COMPILED, LOCKSTEP_COMPILED,
    NOT_EXACT_COMPILED, CAPTURED_COMPILED,
)  # fmt: skip

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


@dataclass(frozen=True)
class GpuStepPlan(BenchRecord):
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
            where = count_of(self.workers)
            raise BadArgument(f"{', '.join(odd)} cannot be measured on {where}: choose from {', '.join(allowed)}")
        divisor = f"a number of workers that divides {self.batch_size}"
        refuse_unequal_shares(self.model, self.batch_size, self.workers, divisor)

    @property
    def batch_size(self) -> int:
        return self.sizes.get("batch_size", GPU_REFERENCES[self.model].batch_size)

    @property
    def title(self) -> str:
        return f"{self.model} on {count_of(self.workers)}{_with_lanes(self.lanes)}, {self.device}"

    @property
    def ddp(self) -> str:
        """The baseline among the sides that is data parallel."""
        return DDP_GLOO if DDP_GLOO in self.sides else DDP


@dataclass(frozen=True)
class GpuStepRequest:
    """What is asked for besides models and workers; None: as is usual."""

    sides: tuple[str, ...] | None = None
    steps: int | None = None
    rounds: int = ROUNDS
    lanes: tuple[int, ...] = (1,)
    ranks_share_gpu: bool = False

    def plan(self, model: str, workers: int, lanes: int) -> GpuStepPlan:
        usual = USUAL_OF_SEVERAL if workers > 1 else _sides_on(workers, lanes, False)
        sides = self.sides or (SHARING_BY_NCCL if self.ranks_share_gpu else usual)
        steps = self.steps or GPU_REFERENCES[model].steps
        return GpuStepPlan(
            model,
            workers,
            tuple(dict.fromkeys(sides)),
            steps,
            self.rounds,
            lanes=lanes,
            ranks_share_gpu=self.ranks_share_gpu,
        )


def make_plans(models: Sequence[str], workers: Sequence[int], request: GpuStepRequest) -> tuple[GpuStepPlan, ...]:
    """A plan for every model on every number of workers, each once; raises before anything runs."""
    return tuple(
        request.plan(name, count, lanes)
        for name in _known_models(models)
        for count in dict.fromkeys(workers)
        for lanes in dict.fromkeys(request.lanes)
    )


def _sides_on(workers: int, lanes: int, ranks_share_gpu: bool) -> tuple[str, ...]:
    if workers > 1:
        return SHARING_BY_NCCL if ranks_share_gpu else SIDES_OF_SEVERAL
    return SIDES if lanes == 1 else (*SIDES, *OF_LANES)


def _with_lanes(lanes: int) -> str:
    return "" if lanes == 1 else f", {lanes} lanes each"


def _known_models(words: Sequence[str]) -> list[str]:
    names = models_named(words, GPU_REFERENCES)
    odd = [name for name in names if name not in GPU_REFERENCES]
    if odd:
        known = ", ".join(GPU_REFERENCES)
        raise BadArgument(f"the model {odd[0]!r} is not measured on a GPU: choose from {known} or all")
    return names


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
    named = [claim for claim in every if claim.side in plan.sides and claim.base in plan.sides]
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
    return {
        "model": plan.model,
        "workers": plan.workers,
        "lanes": plan.lanes,
        "ranks_share_gpu": plan.ranks_share_gpu,
        "device": plan.device,
        "parameters": outcome.parameters,
        "batch_size": plan.batch_size,
        "steps": plan.steps,
        "rounds": max(map(len, outcome.seconds.values()), default=0),
        "reference": outcome.reference,
        "ddp": plan.ddp,
        "sides": [_side(name, plan, outcome) for name in plan.sides],
        "claims": check_claims(plan, outcome.seconds),
    }


def _side(name: str, plan: GpuStepPlan, outcome: GpuOutcome) -> dict[str, Any]:
    """A side's row; if it was not timed, times are null, and `reason` is why."""
    times: Times = [1000 * seconds for seconds in outcome.seconds.get(name, ())]
    bases = {"plain_fused": FUSED, "plain_deterministic": DETERMINISTIC, "ddp": plan.ddp}
    peaks, evidence = outcome.peaks.get(name, {}), outcome.evidence.get(name, {})
    row = {
        "side": name,
        "reason": None if times else outcome.reasons.get(name, "failed: it was never timed"),
        **spread("ms", times),
        "peak_reserved_bytes": peaks.get("reserved_bytes"),
        "peak_allocated_bytes": peaks.get("allocated_bytes"),
        "gradients_apart": _finite(evidence.get("gradients")),
        "movement_apart": _finite(evidence.get("movement")),
        "movement_length": _finite(evidence.get("length")),
        "digest": evidence.get("digest"),
        "remarks": outcome.remarks.get(name, []),
        "rounds_ms": times,
    }
    for word, base in bases.items():
        row |= spread(f"ratio_to_{word}", ratios(outcome.seconds.get(name), outcome.seconds.get(base)))
    return row


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None


def make_report(rows: Sequence[dict[str, Any]], machine: dict[str, Any], mps: bool, stopped: bool) -> dict[str, Any]:
    """`stopped`: by Ctrl-C, so the last row may have fewer rounds than were asked for, and further rows are missing."""
    return {"bench": "step", "machine": machine, "mps": mps, "stopped": stopped, "rows": list(rows)}


def is_whole(report: dict[str, Any]) -> bool:
    return all(side["reason"] is None for row in report["rows"] for side in row["sides"])


def show_row(row: dict[str, Any], console: "Console") -> None:
    size = f"{(row['parameters'] or 0) / 1e6:.1f} M parameters, batch {row['batch_size']}"
    where = f"{count_of(row['workers'])}{_with_lanes(row['lanes'])}"
    console.print(f"{row['model']}, {size}, {where}", style="bold", highlight=False)
    show_table(_columns(row["ddp"]), row["sides"], console)
    for side in row["sides"]:
        reasons = [] if side["reason"] is None else [f"! {side['side']} {side['reason']}"]
        for line in (*reasons, *(f"! {side['side']}: {remark}" for remark in side["remarks"])):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for claim in row["claims"]:
        console.print(_claim_line(claim), highlight=False)
    console.print()


def _columns(ddp: str) -> Columns:
    return (
        ("side", lambda side: side["side"]),
        ("ms", lambda side: (side["reason"] or "").partition(":")[0] or _spread_ms(side)),
        ("÷ plain fused", lambda side: spread_cell(side, "ratio_to_plain_fused", 3)),
        (f"÷ {ddp}", lambda side: spread_cell(side, "ratio_to_ddp", 3)),
        ("GiB", lambda side: _number(side["peak_reserved_bytes"] if side["ms"] else None, 2**30, ".1f")),
        ("apart", lambda side: _number(side["gradients_apart"], 1, ".0e")),
    )


def _spread_ms(side: dict[str, Any]) -> str:
    return spread_cell(side, "ms", 2 if side["ms"] < 100 else 1)


def _number(value: float | None, unit: int, form: str) -> str:
    return "" if value is None else f"{value / unit:{form}}"


def _claim_line(claim: dict[str, Any]) -> str:
    holds = {True: "yes", False: "no", None: "not measured"}[claim["holds"]]
    ratio = "" if claim["ratio"] is None else f" (ratio {claim['ratio']:.3f}, at most {claim['most']:g})"
    return f"{claim['claim']}: {holds}{ratio}"


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
