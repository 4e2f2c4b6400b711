"""Do the sides compute the same? A faster wrong answer is worth nothing: a side that disagrees is not timed.

# Note [What agrees in bfloat16]
# Three things are compared after three steps: the mean that AdamW keeps of the gradients, how far the parameters are
# apart, and how far they went. The mean is the sharpest. AdamW divides by a gradient's own size, so a gradient that is
# only rounding may turn a whole update around, and parameters end far apart where gradients are close.
# Measured on small models, once in bfloat16 and once in float32, which round as differently as two kernels can:
#
#     relative distance of        gradients     parameters    length of the way
#     the same (GPTs, MLP)        0.01 - 0.08   0.05 - 0.22   1.00
#     the same (with BatchNorm)   0.07 - 0.17   0.28 - 0.45   1.00
#     the first batch each time   1.0  - 1.8    0.50 - 1.33   0.98 - 1.30
#     half of each batch          0.85 - 1.5    0.92 - 1.15   0.97 - 1.01
#     a step left out             0.37 - 0.63   0.26 - 0.45   0.68 - 0.78
#
# In float32 another order of samples ends less than 0.001 apart. A deep ResNet with BatchNorm amplifies rounding until
# nothing agrees, unless its residual branches start at zero: so they do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.programs.bench.gpu.plan import CAPTURED, FLAT, LOCKSTEP


@dataclass(frozen=True)
class Tolerance:
    """How far two sides may be apart. See Note [What agrees in bfloat16]."""

    gradients: float
    movement: float
    length: float = 0.1


IN_FLOAT32 = Tolerance(gradients=1e-2, movement=5e-2)
IN_BFLOAT16 = Tolerance(gradients=0.25, movement=0.6)

EQUAL_BITS = (CAPTURED, FLAT)
"""What must hold the bits of LOCKSTEP: a graph runs the kernels that it was captured from, a flat update the same."""


def objection(side: str, found: Mapping[str, float], reference: str, coarse: bool) -> str | None:
    """Why a side is not timed, or None if it agrees with the reference; `coarse`: the model computes in bfloat16."""
    most = IN_BFLOAT16 if coarse else IN_FLOAT32
    told = f"{side} disagrees with {reference} after three steps"
    if not found["gradients"] <= most.gradients:
        return f"{told}: its gradients are off by {found['gradients']:.1e} of their size, more than {most.gradients:g}"
    if not found["movement"] <= most.movement:
        return f"{told}: its parameters are off by {found['movement']:.1e} of their way, more than {most.movement:g}"
    if not abs(found["length"] - 1) <= most.length:
        return f"{told}: its parameters went {found['length']:.3f} times as far, off by more than {most.length:g}"
    return None


def objection_of_replicas(side: str, answers: Sequence[Mapping[str, Any]]) -> str | None:
    """Whether the workers of one side hold different bits after three steps."""
    odd = [rank for rank, answer in enumerate(answers) if answer["digest"] != answers[0]["digest"]]
    if odd:
        return f"{side} is not in agreement with itself: workers 0 and {odd[0]} hold other bits after three steps"
    return None


def objections_of_bits(digests: Mapping[str, str]) -> dict[str, str]:
    """Those of lockstep's other exact sides that hold other bits than lockstep, each with a sentence."""
    wanted = digests.get(LOCKSTEP)
    odd = [side for side in EQUAL_BITS if wanted is not None and digests.get(side, wanted) != wanted]
    return {
        side: f"{side} disagrees with {LOCKSTEP}: both are exact, but after three steps their bits are not equal"
        for side in odd
    }
