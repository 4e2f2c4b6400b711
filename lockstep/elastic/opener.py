"""Opens the wire of a generation."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.elastic.client import probe
from lockstep.elastic.membership.view import Liveness, View
from lockstep.errors import PeerGone
from lockstep.settings.environment import set_default_variable
from lockstep.settings.options import Settings
from lockstep.wire import (
    Agreement,
    Proposal,
    Wire,
    in_gpu_memory,
    in_process,
    in_shared_memory,
    over_gloo,
    over_gpus,
    over_hosts,
    over_nccl,
)
from lockstep.world import World

NCCL_LEFT_TO_US = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
"""See Note [When NCCL waits for ever] in wire/cuda/nccl.py."""

FORM_S = 30.0
"""How long a worker that was alive a moment ago may take to come: it may never have heard that it should."""


@dataclass(frozen=True)
class WireOpener:
    """Opens wires of the kind that the run uses. `on_one_host`: all workers of the run are on one."""

    settings: Settings
    on_one_host: bool

    def open(self, world: World, store: Store, watch: Callable[[], None] | None = None) -> Wire:
        """Collective. The wire of `world`, whose workers meet at `store`."""
        timeout_s, algorithm = self.settings.timeout_s, self.settings.algorithm
        device, exact = self.settings.device, self.settings.exact
        if world.size == 1:
            return in_process(world)
        match self.settings.wire:
            case "gpu":
                return in_gpu_memory(world, store, timeout_s, device, watch=watch)
            case "nccl":
                set_default_variable(*NCCL_LEFT_TO_US)
                return over_nccl(world, store, timeout_s, device, exact=exact, watch=watch)
            case "cuda":
                set_default_variable(*NCCL_LEFT_TO_US)
                return over_gpus(world, store, timeout_s, device, exact=exact, watch=watch)
            case "shared":
                return in_shared_memory(world, store, timeout_s, watch=watch)
            case "hierarchical":
                return over_hosts(world, store, timeout_s, algorithm=algorithm, watch=watch)
            case _:
                return over_gloo(world, store, timeout_s, exact=exact, algorithm=algorithm, watch=watch)

    def form(self, view: View, uid: str, store: Store) -> Wire:
        """Collective. The wire of a generation; raises PeerGone soon if one of its members has died."""
        rank = view.rank_of(uid)
        world = self.world(rank, len(view.members), view.generation)
        wire = self.open(world, store, Watch(view, rank, time.monotonic() + FORM_S))
        try:
            Agreement(
                wire.transport, Proposal({"operation": "a new generation", "generation": view.generation})
            ).check()
        except BaseException:
            wire.close()
            raise
        return wire

    def world(self, rank: int, size: int, generation: int) -> World:
        """On several hosts it is not told how many workers each has: only that no host has all."""
        local = (rank, size) if self.on_one_host else (0, 1)
        return World(rank, size, *local, generation)


@dataclass(frozen=True)
class Watch:
    """Raises PeerGone when a member of `view` is not there any more, or has not come for FORM_S."""

    view: View
    own_rank: int
    until_s: float

    def __call__(self) -> None:
        others = [(rank, member) for rank, member in enumerate(self.view.members) if rank != self.own_rank]
        for rank, member in others:
            if probe(member) is not Liveness.ALIVE:
                raise PeerGone(rank, "it is gone")
        if time.monotonic() > self.until_s:
            raise PeerGone(others[0][0], f"not all had come after {FORM_S:g} s")
