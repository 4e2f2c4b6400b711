"""Gradients that are not finite: found in the lane that made them, reported to all, decided alike by all.

# Note [A sum finds every NaN]
# A sum over a tensor is finite only if every element is: NaN and infinity stay in it. The reverse does not hold: finite
# numbers may add up to more than the dtype can hold. So a finite sum ends the search, and anything else only makes
# a suspect, whose elements are then looked at one by one.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch

from lockstep.gradients.plan import StepPlan
from lockstep.lanes import Assignment
from lockstep.settings.options import Policy, check_policy

Kind = Literal["nan", "inf"]

_FINDING = struct.Struct("<4q")
"""A packed finding: lane, index of the parameter, kind, number of elements. All zeros: nothing was found."""

FINDING_BYTES = _FINDING.size

_KINDS: tuple[Kind, ...] = ("nan", "inf")  # packed as 1 and 2

_OUTCOMES: dict[Policy, str] = {
    "keep": "the step is applied as it is on every worker",
    "skip": "the step is skipped on every worker",
    "stop": "the step is not applied and the run stops on every worker",
}


@dataclass(frozen=True)
class BadGradient:
    """A gradient that is not finite. `kind` is nan if any element is; `count` is the number of all bad elements."""

    name: str
    kind: Kind
    count: int


@dataclass(frozen=True)
class LaneFinding:
    """A lane whose gradient is not finite: who carried it, its first bad parameter, its part of the batch."""

    lane: int
    worker: int
    parameter: str
    kind: Kind
    count: int
    samples: range

    @classmethod
    def of(cls, lane: int, found: BadGradient, step: StepPlan) -> "LaneFinding":
        """What `first_bad` found in a lane of a step."""
        worker = step.assignment.carriers()[lane]
        return cls(lane, worker, found.name, found.kind, found.count, step.samples(lane))


@dataclass(frozen=True)
class NotFiniteVerdict:
    """What all workers do with a step in which some lanes, in ascending order, are not finite."""

    action: Policy
    findings: tuple[LaneFinding, ...]

    def sentence(self, step: int, slots: Sequence[int] | None = None) -> str:
        """The verdict as a sentence; `slots` gives each rank's name for people, if that is another number."""
        first, *others = self.findings
        worker = first.worker if slots is None else slots[first.worker]
        also = f"; also in {_lanes([finding.lane for finding in others])}" if others else ""
        return (
            f"! step {step}: gradient of lane {first.lane} (worker {worker}) is not finite: first in {first.parameter} "
            f"({first.kind}, {_elements(first.count)}), {_samples(first.samples)} of the batch{also}; "
            f"{_OUTCOMES[self.action]}"
        )


@dataclass(frozen=True)
class BadLosses:
    """Losses given to run.backward that are not finite, in a run that keeps such steps.

    `lanes` are in ascending order; `worker` and `loss` are those of the first.
    """

    lanes: tuple[int, ...]
    worker: int
    loss: float

    @classmethod
    def of(cls, losses: Sequence[float | None], assignment: Assignment) -> "BadLosses | None":
        """Those among the losses of all lanes; None if all that were reported are finite."""
        bad = [lane for lane, loss in enumerate(losses) if loss is not None and not math.isfinite(loss)]
        if not bad:
            return None
        return cls(tuple(bad), assignment.carriers()[bad[0]], cast(float, losses[bad[0]]))

    def sentence(self, step: int, slots: Sequence[int]) -> str:
        """As a sentence; `slots` gives each rank's name for people."""
        first, *others = self.lanes
        also = f"; also of {_lanes(others)}" if others else ""
        return (
            f"! step {step}: the loss of lane {first} (worker {slots[self.worker]}) is not finite: {self.loss}{also}; "
            f'{_OUTCOMES["keep"]}. Start with not_finite="skip" or "stop" to have the parameter and the samples named'
        )


@torch.no_grad()
def first_bad(gradients: Mapping[str, torch.Tensor]) -> BadGradient | None:
    """The first gradient, in the order given, that is not finite everywhere; None if there is none.

    One reading of the memory, and one wait for the device per dtype, when all are finite. See Note [A sum finds
    every NaN].
    """
    values = {name: _stored(gradient) for name, gradient in gradients.items()}
    suspects = _suspects(values)
    bad = (_inspected(name, values[name]) for name in values if name in suspects)
    return next((found for found in bad if found is not None), None)


def decide(policy: Policy, findings: Sequence[LaneFinding]) -> NotFiniteVerdict | None:
    """What to do with the step, the same on every worker that has the same findings; None if all lanes are finite."""
    check_policy(policy)
    if not findings:
        return None
    return NotFiniteVerdict(policy, tuple(sorted(findings, key=lambda finding: finding.lane)))


def pack(finding: LaneFinding | None, names: Sequence[str]) -> bytes:
    """A finding as FINDING_BYTES; `names` are all parameters, in an order that every worker shares."""
    if finding is None:
        return bytes(FINDING_BYTES)
    index = list(names).index(finding.parameter)
    return _FINDING.pack(finding.lane, index, 1 + _KINDS.index(finding.kind), finding.count)


def unpack(record: bytes, names: Sequence[str], step: StepPlan) -> LaneFinding | None:
    """What `pack` was given; the lane's worker and samples, which do not travel, follow from the step's plan."""
    lane, index, kind, count = _FINDING.unpack(record)
    if kind == 0:
        return None
    return LaneFinding.of(lane, BadGradient(names[index], _KINDS[kind - 1], count), step)


def _stored(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers that a gradient holds: of a sparse one, those that are there."""
    if gradient.layout == torch.sparse_coo:
        return gradient._values()
    return gradient


def _suspects(values: Mapping[str, torch.Tensor]) -> set[str]:
    """The names whose sum is not finite, read from the device once per dtype; all that are bad, and maybe more."""
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, value in values.items():
        if value.numel():
            groups.setdefault((value.device, value.dtype), []).append(name)
    return {name for names in groups.values() for name in _not_finite(names, [values[name] for name in names])}


def _not_finite(names: Sequence[str], tensors: list[torch.Tensor]) -> list[str]:
    finite = torch.isfinite(torch.stack(_reduced(tensors))).view(len(names), -1).all(1)
    if finite.all():
        return []
    return [name for name, fine in zip(names, finite.tolist(), strict=True) if not fine]


def _reduced(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Equally many numbers for each tensor, finite only if the tensor is, by the fastest way its device has."""
    if tensors[0].device.type != "cpu":
        return list(torch._foreach_norm(tensors, math.inf))  # one kernel for many tensors; slow on a CPU
    if tensors[0].dtype == torch.float16:
        # A sum of float16 soon passes 65504 and would make every gradient a suspect.
        return [extreme for tensor in tensors for extreme in torch.aminmax(tensor)]
    return [tensor.sum() for tensor in tensors]


def _inspected(name: str, value: torch.Tensor) -> BadGradient | None:
    count = int(value.numel() - torch.isfinite(value).sum())
    if count == 0:
        return None
    return BadGradient(name, "nan" if value.isnan().any() else "inf", count)


def _elements(count: int) -> str:
    return "1 element" if count == 1 else f"{count} elements"


def _samples(samples: range) -> str:
    if len(samples) == 1:
        return f"sample {samples.start}"
    return f"samples {samples.start}-{samples.stop - 1}"


def _lanes(lanes: Sequence[int]) -> str:
    word = "lane" if len(lanes) == 1 else "lanes"
    return f"{word} {', '.join(map(str, lanes))}"
