"""A step as a value.

# Note [Nothing to add]
# A step with one lane on one worker has nothing to fold and nobody to talk to: what autograd leaves in `p.grad` and
# what the forward pass leaves in the buffers is the result, bit for bit what folding one lane would give. Such
# a step uses no buckets, and costs what a plain loop costs. Where buckets change what goes through them
# (Note [The dtype of the sum] in fold.py), folding one lane gives something else: such a step goes through them too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from lockstep.errors import Disagreement
from lockstep.lanes import Assignment, present_lanes, share
from lockstep.wire.agreement import Facts, first_difference


class Place(Protocol):
    """Where in the user's script a step is. Asked only where there are other workers."""

    def facts(self) -> Facts:
        """What must be equal on all workers before the step counts."""

    def details(self) -> Facts:
        """What helps to judge and to explain a difference: asked for if there is one."""

    def judge(self, here: int, everyone: Sequence[Facts]) -> Disagreement | None:
        """What worker `here` raises where the workers differ; None if they may. Called on any thread."""


class Nowhere:
    """The place of a step that belongs to no script."""

    def facts(self) -> Facts:
        return {}

    def details(self) -> Facts:
        return {}

    def judge(self, here: int, everyone: Sequence[Facts]) -> Disagreement | None:
        return first_difference(here, everyone)


NOWHERE = Nowhere()


@dataclass(frozen=True)
class StepPlan:
    """What a step computes: all of it the same on every worker."""

    step: int
    num_samples: int
    assignment: Assignment
    place: Place = NOWHERE
    always_folds: bool = False
    """One lane on one worker goes through the buckets all the same."""
    least: int = 1
    """How many samples a lane has at least. See Note [No lane with a single sample] in lanes.py."""
    marks_lanes: bool = False
    """See Note [A step computed twice] in marks.py."""

    @cached_property
    def present(self) -> tuple[int, ...]:
        return present_lanes(self.num_samples, self.assignment.num_lanes, self.least)

    @cached_property
    def has_nothing_to_add(self) -> bool:
        """See Note [Nothing to add]."""
        return len(self.present) == 1 and self.assignment.num_workers == 1 and not self.always_folds

    @cached_property
    def shares(self) -> dict[int, int]:
        """How many samples each lane holds, without the empty ones."""
        return {lane: len(self.samples(lane)) for lane in self.present}

    def samples(self, lane: int) -> range:
        """The positions in the global batch that belong to `lane`."""
        return share(self.num_samples, lane, self.assignment.num_lanes, self.least)
