"""Opens the wire of a later generation, whose members may die meanwhile."""

import time
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.elastic.client import Standpoint, probe_all
from lockstep.elastic.membership.view import Liveness, View
from lockstep.elastic.store import Secret
from lockstep.errors import PeerGone
from lockstep.wire import Agreement, Proposal, Wire, WireOptions, open_wire
from lockstep.world import World

FORM_S = 20.0
"""How long a worker that was alive a moment ago may take to come: it may never have learned that it should."""


@dataclass(frozen=True)
class WireOpener:
    """Opens wires of the kind that the run uses. `on_one_host`: all workers of the run are on one."""

    options: WireOptions
    on_one_host: bool

    def form(self, view: View, opened_by: Standpoint, store: Store, secret: Secret) -> Wire:
        """Collective. The wire of a generation; raises PeerGone soon if one of its members is gone or elsewhere."""
        rank = view.rank_of(opened_by.uid)
        world = self.world(rank, len(view.members), view.generation)
        wire = open_wire(self.options, world, store, MemberWatch(view, opened_by, secret, time.monotonic() + FORM_S))
        try:
            facts = {"operation": "a new generation", "generation": view.generation}
            Agreement(wire.transport, Proposal(facts)).check()
        except BaseException:
            wire.close()
            raise
        return wire

    def world(self, rank: int, size: int, generation: int) -> World:
        """On several hosts nobody knows how many workers each has: only that no host has all."""
        local = (rank, size) if self.on_one_host else (0, 1)
        return World(rank, size, *local, generation)


@dataclass(frozen=True)
class MemberWatch:
    """Raises PeerGone when a member of `view` is not there any more, or has not come for FORM_S."""

    view: View
    seen_from: Standpoint
    secret: Secret
    until_s: float

    def __call__(self) -> None:
        others = [member for member in self.view.members if member.uid != self.seen_from.uid]
        health = probe_all(others, self.secret, self.seen_from)
        for member in others:
            if health[member.uid] not in (Liveness.ALIVE, Liveness.NEW):
                raise PeerGone(self.view.rank_of(member.uid), "it is gone")
        if time.monotonic() > self.until_s:
            raise PeerGone(self.view.rank_of(others[0].uid), f"not all had come after {FORM_S:g} s")
