"""What a worker reports of its health in a step: a lane whose gradient is not finite, and a fingerprint of its state.

Both travel in the step's record, so that every worker reads the same and decides the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.gradients import finite
from lockstep.gradients.fingerprint import Drift, combined, fingerprints, odd_ones
from lockstep.gradients.finite import BadLosses, LaneFinding, NotFiniteVerdict
from lockstep.gradients.plan import StepPlan
from lockstep.settings.options import Policy
from lockstep.wire import Wire, exchange

REMARK_STEPS = 1000
"""How many steps pass at least between two remarks on losses that are not finite."""


@dataclass(frozen=True)
class HealthPlan:
    """What is looked for. `state` gives all that replicas have in common, by name; it is compared every so many steps.

    A script that updates each replica differently does so from the first update on: so it is compared in step 1 too.
    `drift_every` 0: never. With the policy "keep" gradients are not looked at, which costs nothing.
    """

    state: Callable[[], Mapping[str, Any]] = dict
    policy: Policy = "keep"
    drift_every: int = 0

    @property
    def looks(self) -> bool:
        """Whether gradients are looked at."""
        return self.policy != "keep"

    def compares_in(self, step: StepPlan) -> bool:
        """Whether the state is compared in a step; a worker that is alone compares nothing."""
        if self.drift_every == 0 or step.step == 0 or step.assignment.num_workers == 1:
            return False
        return step.step == 1 or step.step % self.drift_every == 0


class StepHealth:
    """One step's health on this worker, from its beginning to what all workers found."""

    def __init__(self, plan: HealthPlan, step: StepPlan, names: Sequence[str]) -> None:
        self._plan, self._step, self._names = plan, step, names
        self._finding: LaneFinding | None = None
        self._compared: Sequence[str] = ()
        """The names of what is compared."""
        self._vector: torch.Tensor | None = None
        if plan.compares_in(step):
            state = plan.state()
            self._compared, self._vector = list(state), fingerprints(state)

    @property
    def looks(self) -> bool:
        """Whether more gradients are to be looked at: not if one was found that is not finite."""
        return self._plan.looks and self._finding is None

    def look(self, lane: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Looks at some of a lane's own gradients."""
        if not self.looks:
            return
        bad = finite.first_bad(gradients)
        if bad is not None:
            self._finding = LaneFinding.of(lane, bad, self._step)

    def packed(self) -> bytes:
        """A fingerprint and a finding, if they are taken: of one size on every worker, since all have the same plan."""
        fingerprint = b"" if self._vector is None else combined(self._vector)
        return fingerprint + finite.pack(self._finding, self._names) if self._plan.looks else fingerprint

    def verdict(self, healths: Sequence[bytes]) -> NotFiniteVerdict | None:
        """What all workers do with lanes that are not finite; None if all are finite, or none were looked at."""
        if not self._plan.looks:
            return None
        records = [health[-finite.FINDING_BYTES :] for health in healths]
        found = [finite.unpack(record, self._names, self._step) for record in records]
        return finite.decide(self._plan.policy, [finding for finding in found if finding is not None])

    def differs(self, healths: Sequence[bytes]) -> bool:
        """Whether the workers' fingerprints differ; not in a step in which none are taken."""
        num_bytes = len(healths[0]) - (finite.FINDING_BYTES if self._plan.looks else 0)
        return any(health[:num_bytes] != healths[0][:num_bytes] for health in healths)

    def drift(self, healths: Sequence[bytes], wire: Wire) -> Drift | None:
        """Who has drifted from the others. Collective only if one has: then all fingerprints are exchanged."""
        if self._vector is None or not self.differs(healths):
            return None
        sizes = exchange(wire.transport, _bytes(torch.tensor([self._vector.numel()], device="cpu")))
        padded = torch.zeros(max(int(size.view(torch.int64)) for size in sizes), dtype=torch.int64, device="cpu")
        padded[: self._vector.numel()] = self._vector
        vectors = [record.view(torch.int64) for record in exchange(wire.transport, _bytes(padded))]
        cut = [vector[: int(size.view(torch.int64))] for vector, size in zip(vectors, sizes, strict=True)]
        return odd_ones(cut, self._compared)


class Remarks:
    """Remarks on losses that are not finite where such steps are kept: the first time, and then seldom.

    A worker that joins has remarked on nothing yet.
    """

    def __init__(self) -> None:
        self._last: int | None = None

    def on(self, losses: Sequence[float | None], step: StepPlan) -> BadLosses | None:
        """Decided from the losses of all lanes, so alike on all workers that were there; None if there is no news."""
        if self._last is not None and step.step - self._last < REMARK_STEPS:
            return None
        bad = BadLosses.of(losses, step.assignment)
        self._last = self._last if bad is None else step.step
        return bad


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
