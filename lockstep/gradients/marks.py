"""Marks of the lanes of a step: whether two workers that compute the same lane get the same gradient.

# Note [A step computed twice]
# A newcomer has run the script from the top. Its state was given to it, but the script's own variables were not: one
# that its lanes depend on (a weight of the loss that shrinks, a number in an attribute) begins anew there. Nothing that
# workers compare before a step would show it, and its lanes would go into the sum. So as long as a newcomer is on
# probation, each step is computed twice: once by the others alone, and then with the newcomer's lanes. Each worker
# marks the gradient of each of its lanes, and the marks travel in the step's record. A lane that the newcomer has
# computed must have the mark that the others got. If it has another one, the newcomer leaves, and nothing that it
# computed has counted. The first of the two steps is undone, as a step is in which a worker was lost. Where a worker
# that has computed a lane both times got two marks, the script's lanes are not reproducible, and nothing is shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.gradients.fingerprint import fingerprints
from lockstep.lanes import Assignment

_LARGEST = 2**53
"""A mark travels as a float, which holds whole numbers below this exactly."""

Marks = Sequence[float | None]
"""By lane; None where no worker has computed it."""


class LaneMarks:
    """The marks of the lanes that this worker computes in one step."""

    def __init__(self) -> None:
        self._marks: dict[int, int] = {}

    def look(self, lane: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Some of a lane's gradients, by name."""
        self._marks[lane] = (self._marks.get(lane, 0) + int(fingerprints(gradients).sum())) % _LARGEST

    def of_lanes(self, num_lanes: int) -> list[float | None]:
        """For the record."""
        return [float(self._marks[lane]) if lane in self._marks else None for lane in range(num_lanes)]


@dataclass(frozen=True)
class KnownLanes:
    """What the lanes of a step have come to without its newcomers. See Note [A step computed twice]."""

    marks: Marks
    assignment: Assignment
    newcomers: frozenset[int]

    def computed_otherwise(self, marks: Marks, assignment: Assignment) -> dict[int, int]:
        """The newcomers that have got another mark for a lane, by rank, with the first such lane.

        `assignment` says who has computed the lanes that have these marks.
        """
        before, now = self.assignment.carriers(), assignment.carriers()
        other = [lane for lane in sorted(now) if self.marks[lane] != marks[lane]]
        if any(before[lane] == now[lane] for lane in other):
            return {}
        return {now[lane]: lane for lane in reversed(other) if now[lane] in self.newcomers}
