"""A generation: its members, its wire, and which worker computes which lanes."""

from dataclasses import dataclass

from lockstep.lanes import Assignment
from lockstep.wire.open import Wire
from lockstep.world import World


@dataclass(frozen=True)
class Generation:
    """Wire, members and assignment of lanes, which change together: a new generation replaces this value.

    `slots` are the members' names in messages, by rank. A step is computed in one generation from its beginning to its
    commit; when workers join or leave it is computed again in the next one.
    """

    wire: Wire
    slots: tuple[int, ...]
    assignment: Assignment

    @property
    def world(self) -> World:
        return self.wire.world

    @property
    def lanes(self) -> tuple[int, ...]:
        return self.assignment.lanes_of[self.world.rank]
