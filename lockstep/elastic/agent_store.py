"""How workers that torchrun's agents have started find those of the same start, in a store that outlives them.

# Note [Which start]
# Agents on several hosts restart their workers when one is lost. They keep the store, with what earlier workers have
# written, and count restarts each for itself: an agent that only follows the others' restart does not count it. So no
# variable says which workers belong together. Worker 0 opens a meeting under a name that nobody had before, and the
# others register there by names of their own. When all have, worker 0 writes down whom it has counted, and they go on
# under the meeting's name. Who was not counted (a predecessor was), or is in a meeting whose worker 0 is gone, waits
# for the next one. A worker 0 that is about to be ended may open a meeting too; so one that waits opens its own again.
"""

import json
import secrets
import time
from typing import Protocol

from lockstep.errors import BadEnvironment

LOOK_S = 0.1
_MEETING = "lockstep/meeting"


class AgentStore(Protocol):
    """What is used of torch's TCPStore."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def meet(store: AgentStore, rank: int, size: int, limit_s: float) -> str:
    """Collective. The name under which the workers of this start meet. See Note [Which start]."""
    me, until_s = secrets.token_hex(8), time.monotonic() + limit_s
    while time.monotonic() < until_s:
        found = _opened(store, me, size) if rank == 0 else _counted(store, me, rank)
        if found is not None:
            return found
    raise BadEnvironment(
        f"worker {rank} of {size} has not met the others at the store of torchrun's agent within {limit_s:g} s: check "
        "that the agents of all hosts run"
    )


def _opened(store: AgentStore, me: str, size: int) -> str | None:
    """Worker 0's part: opens its meeting if it is not the present one, and closes it when all have registered."""
    if _read(store, _MEETING) != me:
        store.set(_MEETING, me)
    keys = [_place(me, rank) for rank in range(1, size)]
    if keys and not _comes(store, keys):
        return None
    counted = [me, *(str(_read(store, key)) for key in keys)]
    store.set(f"{_MEETING}/{me}/counted", json.dumps(counted))
    return me


def _counted(store: AgentStore, me: str, rank: int) -> str | None:
    """Another worker's part: registers in the present meeting, and waits until that is closed or another is opened."""
    if not _comes(store, [_MEETING]):
        return None
    name = str(_read(store, _MEETING))
    if _read(store, _place(name, rank)) != me:
        store.set(_place(name, rank), me)
    if not _comes(store, [f"{_MEETING}/{name}/counted"]):
        return None
    counted = json.loads(str(_read(store, f"{_MEETING}/{name}/counted")))
    if rank < len(counted) and counted[rank] == me:
        return name
    time.sleep(LOOK_S)
    return None


def _place(meeting: str, rank: int) -> str:
    return f"{_MEETING}/{meeting}/{rank}"


def _read(store: AgentStore, key: str) -> str | None:
    return bytes(store.get(key)).decode() if store.check([key]) else None


def _comes(store: AgentStore, keys: list[str]) -> bool:
    """Whether all keys are there; looks again after LOOK_S. The store's own wait would print warnings at its end."""
    if store.check(keys):
        return True
    time.sleep(LOOK_S)
    return store.check(keys)
