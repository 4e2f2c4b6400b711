"""From times to what is reported. Ratios are made within a round, where both sides met the same machine."""

import statistics
from collections.abc import Sequence
from typing import Any

from lockstep.programs.bench.plan import ALL_THREADS, DDP, LOCKSTEP, ON_BACKEND, ONE_THREAD, REFERENCES, SIDES, Plan
from lockstep.programs.bench.result import Result


def make_row(plan: Plan, result: Result) -> dict[str, Any]:
    """One row of the report: medians over rounds, ratios with their range, and the rounds themselves."""
    times = {side: [times[side] for times in result.rounds] for side in SIDES}
    return {
        "model": plan.model,
        "workers": plan.workers,
        "parameters": result.parameters,
        "batch_size": REFERENCES[plan.model].batch_size,
        "steps": plan.steps,
        "rounds": plan.rounds,
        **{f"{side}_ms": statistics.median(times[side]) for side in SIDES},
        **_ratio("speedup_over_ddp", times[DDP], times[LOCKSTEP]),
        **_ratio("speedup_of_ddp_on_lockstep", times[DDP], times[ON_BACKEND]),
        **_ratio("lockstep_over_plain_one_thread", times[LOCKSTEP], times[ONE_THREAD]),
        **_ratio("lockstep_over_plain_all_threads", times[LOCKSTEP], times[ALL_THREADS]),
        "difference_from_lockstep": result.differences,
        "rounds_ms": times,
    }


def make_report(rows: Sequence[dict[str, Any]], machine: dict[str, Any]) -> dict[str, Any]:
    return {"bench": "step", "machine": machine, "rows": list(rows)}


def _ratio(name: str, above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """The median of the ratios of each round, and the lowest and highest of them."""
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    return {name: statistics.median(ratios), f"{name}_low": min(ratios), f"{name}_high": max(ratios)}
