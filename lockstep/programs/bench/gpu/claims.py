"""What lockstep claims of a step on a GPU, and whether it held in a measurement. Without torch."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.programs.bench.gpu.plan import (
    BY_HAND,
    CAPTURED,
    DDP,
    DDP_DETERMINISTIC,
    DDP_GLOO,
    DETERMINISTIC,
    FLAT,
    FUSED,
    LOCKSTEP,
    NOT_EXACT,
    Plan,
)


@dataclass(frozen=True)
class Claim:
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


CLAIMS = (
    Claim(LOCKSTEP, DETERMINISTIC, 1.01),
    Claim(NOT_EXACT, FUSED, 1.01),
    Claim(LOCKSTEP, DDP_DETERMINISTIC, 1.0),
    Claim(LOCKSTEP, DDP, 1.0),
    Claim(NOT_EXACT, DDP, 1.0),
    Claim(CAPTURED, DDP, 0.25, model="gpt10m"),
    Claim(CAPTURED, BY_HAND, 1.05),
    Claim(FLAT, BY_HAND, 1.05),
)

CLAIMS_OF_SEVERAL = (
    Claim(LOCKSTEP, DDP_GLOO, 1.0),
    Claim(CAPTURED, DDP_GLOO, 1.0),
    Claim(LOCKSTEP, DDP, 1.0),
)


def check_claims(plan: Plan, seconds: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """The claims for which the plan names both sides; `holds` is None where one of them was not timed."""
    every = CLAIMS if plan.workers == 1 else CLAIMS_OF_SEVERAL
    named = [claim for claim in every if claim.side in plan.sides and claim.base in plan.sides]
    return [_checked(claim, seconds) for claim in named if claim.model in (None, plan.model)]


def _checked(claim: Claim, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The median of the ratios within rounds decides."""
    above, below = seconds.get(claim.side), seconds.get(claim.base)
    if not above or not below:
        return {"claim": claim.text, "most": claim.most, "ratio": None, "holds": None}
    ratio = statistics.median(one / other for one, other in zip(above, below, strict=True))
    return {"claim": claim.text, "most": claim.most, "ratio": ratio, "holds": ratio <= claim.most}
