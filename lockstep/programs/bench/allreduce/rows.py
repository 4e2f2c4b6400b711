"""From times to what is reported. The ratio to Gloo is made within a round, where both met the same machine."""

import statistics
from collections.abc import Sequence
from typing import Any

from lockstep.programs.bench.allreduce.plan import FLOOR, GLOO, LOCKSTEP, SIDES, Plan
from lockstep.programs.bench.allreduce.result import Result, Times
from lockstep.programs.bench.spread import quantile


def make_rows(plan: Plan, result: Result) -> list[dict[str, Any]]:
    """One row for every size: medians over rounds, ratios, and the rounds themselves."""
    return [_row(plan, times) for times in result.sizes]


def make_report(algorithm: str, rows: Sequence[dict[str, Any]], machine: dict[str, Any]) -> dict[str, Any]:
    return {"bench": "allreduce", "machine": machine, "algorithm": algorithm, "rows": list(rows)}


def _row(plan: Plan, times: Times) -> dict[str, Any]:
    each = {side: [blocks[side] for blocks in times.rounds] for side in SIDES}
    middle = {side: statistics.median(each[side]) for side in SIDES}
    ratios = [gloo / lockstep for gloo, lockstep in zip(each[GLOO], each[LOCKSTEP], strict=True)]
    return {
        "workers": plan.workers,
        "bytes": times.num_bytes,
        **{f"{side}_ms": middle[side] for side in SIDES},
        "lockstep_p95_ms": times.p95[LOCKSTEP],
        "gloo_p95_ms": times.p95[GLOO],
        "bandwidth_gb_per_s": _gb_per_s(times.num_bytes, middle[LOCKSTEP]),
        "gloo_bandwidth_gb_per_s": _gb_per_s(times.num_bytes, middle[GLOO]),
        "ratio_to_gloo": statistics.median(ratios),
        "ratio_to_gloo_low": quantile(ratios, 0.25),
        "ratio_to_gloo_high": quantile(ratios, 0.75),
        "ratio_to_floor": middle[LOCKSTEP] / middle[FLOOR],
        "rounds": plan.rounds,
        "repetitions": times.repetitions,
        "rounds_ms": each,
    }


def _gb_per_s(num_bytes: int, ms: float) -> float:
    """Algorithm bandwidth: the tensor's bytes by the time, whatever was moved for it."""
    return num_bytes / ms / 1e6
