"""From recoveries to what is reported. Ratios are made within a round, where all sides lost the same worker."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lockstep.programs.bench.recovery.plan import RESTART, SPARE, SURVIVORS, Plan, Round, Side
from lockstep.programs.bench.recovery.recovery import Recovery
from lockstep.programs.bench.spread import quantile

CLAIMS_S = {SURVIVORS.name: 1.0, SPARE.name: 2.0}
"""What lockstep claims of the median time until the next step, side by side."""


def make_report(
    plan: Plan,
    rounds: Sequence[Round],
    measured: Sequence[dict[str, Recovery]],
    steps: dict[str, int],
    baseline_agrees: bool | None,
    machine: dict[str, Any],
) -> dict[str, Any]:
    """`baseline_agrees`: whether its disturbed runs all ended with the bits of an undisturbed one; None if not run."""
    rows = [make_row(side, measured, steps[side.name]) for side in plan.sides]
    return {
        "bench": "recovery",
        "machine": machine,
        "model": plan.model,
        "workers": plan.workers,
        "lanes": plan.lanes,
        "kills": plan.kills,
        "rows": rows,
        "claims": [make_claim(row) for row in rows if row["side"] in CLAIMS_S],
        "lockstep_bits_agree": True,  # or there would be no report
        "baseline_bits_agree": baseline_agrees,
        "rounds": [_round(each, found) for each, found in zip(rounds, measured, strict=True)],
    }


def make_row(side: Side, measured: Sequence[dict[str, Recovery]], steps: int) -> dict[str, Any]:
    """One side: seconds until the next step and until all were back, steps lost, and how many times DDP's time."""
    own = [found[side.name] for found in measured]
    whole = [recovery.whole_s for recovery in own if recovery.whole_s is not None]
    lost = [recovery.steps_lost for recovery in own]
    return {
        "side": side.name,
        "title": side.title,
        "steps": steps,
        **_spread("next", [recovery.next_s for recovery in own]),
        **_spread("whole", whole),
        "whole_reached": len(whole),
        "steps_lost": sum(lost),
        "steps_lost_median": statistics.median(lost),
        **_ratio(side, measured),
    }


def make_claim(row: dict[str, Any]) -> dict[str, Any]:
    most_s, median_s = CLAIMS_S[row["side"]], row["next_median_s"]
    return {
        "side": row["side"],
        "title": row["title"],
        "most_s": most_s,
        "median_s": median_s,
        "holds": median_s <= most_s,
    }


def _spread(name: str, times_s: Sequence[float]) -> dict[str, float | None]:
    """Median, nine in ten, and the longest; None where there is no time."""
    fractions = {"median": 0.5, "p90": 0.9, "max": 1.0}
    return {f"{name}_{word}_s": quantile(times_s, each) if times_s else None for word, each in fractions.items()}


def _ratio(side: Side, measured: Sequence[dict[str, Recovery]]) -> dict[str, float | None]:
    """How many times as long the restart took, saved every step: the median of rounds, the lowest and highest."""
    names = ("restart_ratio", "restart_ratio_low", "restart_ratio_high")
    if not all(RESTART.name in found for found in measured):
        return dict.fromkeys(names)
    ratios = [found[RESTART.name].next_s / found[side.name].next_s for found in measured]
    return dict(zip(names, (statistics.median(ratios), min(ratios), max(ratios)), strict=True))


def _round(each: Round, found: dict[str, Recovery]) -> dict[str, Any]:
    return {
        "victim": each.kill.victim,
        "step": each.kill.step,
        "order": [side.name for side in each.order],
        "recoveries": {name: asdict(recovery) for name, recovery in found.items()},
    }
