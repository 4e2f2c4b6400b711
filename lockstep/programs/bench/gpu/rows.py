"""From times to what is reported. Ratios are made within a round, where both sides met the same machine."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from lockstep.programs.bench.gpu.claims import check_claims
from lockstep.programs.bench.gpu.plan import DETERMINISTIC, FUSED, Plan
from lockstep.programs.bench.gpu.turns import Outcome


def make_row(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """One model on one number of workers: every side, and what the claims come to."""
    return {
        "model": plan.model,
        "workers": plan.workers,
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


def make_report(rows: Sequence[dict[str, Any]], machine: dict[str, Any], mps: bool, stopped: bool) -> dict[str, Any]:
    """`stopped`: by Ctrl-C, so the last row may have fewer rounds than were asked for, and further rows are missing."""
    return {"bench": "step", "machine": machine, "mps": mps, "stopped": stopped, "rows": list(rows)}


def is_whole(report: dict[str, Any]) -> bool:
    """Whether every side of every row was timed."""
    return all(side["reason"] is None for row in report["rows"] for side in row["sides"])


def _side(name: str, plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """A side's row; times are null, and `reason` says why, where it was not timed."""
    seconds = outcome.seconds.get(name)
    return {
        "side": name,
        "reason": None if seconds else outcome.reasons.get(name, "failed: it was never timed"),
        **_times(seconds),
        **_ratio("ratio_to_plain_fused", seconds, outcome.seconds.get(FUSED)),
        **_ratio("ratio_to_plain_deterministic", seconds, outcome.seconds.get(DETERMINISTIC)),
        **_ratio("ratio_to_ddp", seconds, outcome.seconds.get(plan.ddp)),
        "peak_reserved_bytes": outcome.peaks.get(name, {}).get("reserved_bytes"),
        "peak_allocated_bytes": outcome.peaks.get(name, {}).get("allocated_bytes"),
        **{f"{what}_apart": _finite(outcome.evidence.get(name, {}).get(what)) for what in ("gradients", "movement")},
        "movement_length": _finite(outcome.evidence.get(name, {}).get("length")),
        "digest": outcome.evidence.get(name, {}).get("digest"),
        "remarks": outcome.remarks.get(name, []),
        "rounds_ms": [1000 * value for value in seconds or ()],
    }


def _times(seconds: Sequence[float] | None) -> dict[str, float | None]:
    if not seconds:
        return {"ms": None, "ms_low": None, "ms_high": None}
    return {"ms": 1000 * statistics.median(seconds), "ms_low": 1000 * min(seconds), "ms_high": 1000 * max(seconds)}


def _ratio(name: str, above: Sequence[float] | None, below: Sequence[float] | None) -> dict[str, float | None]:
    """The median of the ratios of each round, and the lowest and highest of them."""
    if not above or not below:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    return {name: statistics.median(ratios), f"{name}_low": min(ratios), f"{name}_high": max(ratios)}


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
