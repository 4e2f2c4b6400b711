"""Which worker was gone first, agreed by all that are left.

# Note [The first to go]
# A worker that loses a peer leaves, and those that wait for that worker see it leave: in a chain of waits each would
# name the healthy one before it. So a worker that notices that a peer is gone writes it into the store before it
# leaves. The first entry is final, and all name that worker. Worker 0, in whose process the store may be, closes its
# connections and then waits until all others have read it, for at most LINGER_S. Workers that recover need none of
# this: they ask each other's endpoints. They get no store, and each keeps what it noticed to itself.
"""

import threading
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lockstep.world import World

ANSWER_S = 5.0
LINGER_S = 2.0


class FirstGone:
    """The entry in the store that names the first worker of a generation that was noticed to be gone."""

    def __init__(self, world: World, store: Store | None) -> None:
        self._world = world
        self._store = None if store is None else PrefixStore(f"lockstep/gone/{world.generation}", store)
        self._name: int | None = None

    @property
    def known(self) -> bool:
        """Whether this worker knows of one that is gone."""
        return self._name is not None

    def name(self, suspect: int) -> int | None:
        """The worker that was gone first: `suspect`, or one noticed before. None if the store does not answer."""
        if self._store is None:
            self._name = suspect  # the one before may have left because of this one
        elif self._name is None:
            # On a thread that may be left behind: a store on a host that vanished never answers.
            question = (self._store, suspect)
            asking = threading.Thread(target=self._ask, args=question, name="lockstep-first-gone", daemon=True)
            asking.start()
            asking.join(ANSWER_S)
        return self._name

    def linger(self) -> None:
        """See Note [The first to go]. Returns at once where no worker is gone."""
        if self._world.rank != 0 or self._name is None or self._store is None:
            return
        others = [_read_by(peer) for peer in self._world.peers if peer != self._name]
        with suppress(RuntimeError):  # some will not read it any more
            self._store.wait(others, timedelta(seconds=LINGER_S))

    def _ask(self, store: Store, suspect: int) -> None:
        with suppress(RuntimeError):  # a store that is gone leaves the name unknown
            self._name = int(store.compare_set("first", "", str(suspect)))
            store.set(_read_by(self._world.rank), "")


def _read_by(rank: int) -> str:
    return f"read by {rank}"
