"""The store at which the workers of a run meet.

# Note [One store for all runs]
# A script may start several runs. The first opens the store, and it stays open as long as the process: worker 0 could
# not listen at the same port again before all others have left it. Each run has a part of the store to itself.
"""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lockstep.elastic.agent_store import meet
from lockstep.elastic.store import LocalStore, NotOfThisRun, RemoteStore, Secret, StoreServer
from lockstep.elastic.store.stores import connect_patiently
from lockstep.elastic.store.values import KeyValues
from lockstep.errors import BadEnvironment
from lockstep.settings.environments.place import LOOPBACK, LaunchPlace

SOON_S = 8.0
"""After how long a worker says that it does not find worker 0, and looks on."""

_opened: dict[LaunchPlace, "MeetingPlace"] = {}
_of_parents: list["MeetingPlace"] = []
"""Those of the process that this one was forked from: to end an agent's store would be to wait for its threads."""


@dataclass(frozen=True)
class MeetingPlace:
    """The store where all meet, and the server of it if this worker keeps it. Both end with the process."""

    store: Store
    server: StoreServer | None = None


def _keep_silent(text: str) -> None:
    """Nobody listens."""


def open_store(place: LaunchPlace, timeout_s: float, run: int = 0, note: Callable[[str], None] = _keep_silent) -> Store:
    """The store that all workers of a run share. Collective: returns once worker 0, or the agent, answers.

    `timeout_s` bounds the wait here, and is the store's own limit for every later wait. `run` counts the runs of the
    script. See Note [One store for all runs]. `note` is called when worker 0 is not found soon.
    """
    timeout = timedelta(seconds=timeout_s)
    if place not in _opened:
        try:
            _opened[place] = _open(place, timeout, note)
        except (OSError, RuntimeError) as error:  # torch's network errors are RuntimeErrors
            raise BadEnvironment(_explain(place, timeout_s, error)) from error
    store = _opened[place].store
    store.set_timeout(timeout)
    return PrefixStore(f"run/{run}", store)


def _leave_to_parent() -> None:
    _of_parents.extend(_opened.values())
    _opened.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _open(place: LaunchPlace, timeout: timedelta, note: Callable[[str], None]) -> MeetingPlace:
    limit_s, values = timeout.total_seconds(), KeyValues()
    if place.port == 0:
        return MeetingPlace(LocalStore(values, limit_s))
    if place.agent_store:
        # The agent keeps its own keys there, and keeps the store over a restart.
        world = place.world
        agent = TCPStore(place.address, place.port, world.size, False, timeout, wait_for_workers=False)
        return MeetingPlace(PrefixStore(f"lockstep/{meet(agent, world.rank, world.size, limit_s)}", agent))
    secret = Secret(place.secret)
    if place.world.rank != 0:
        return MeetingPlace(_connected(place, secret, limit_s, note))
    return MeetingPlace(LocalStore(values, limit_s), StoreServer(_listener(place), values, secret))


def _connected(place: LaunchPlace, secret: Secret, limit_s: float, note: Callable[[str], None]) -> RemoteStore:
    address = f"{LOOPBACK if place.world.on_one_host else place.address}:{place.port}"
    try:
        store = connect_patiently(address, secret, min(SOON_S, limit_s))
    except NotOfThisRun:
        raise
    except DistNetworkError as error:
        if limit_s <= SOON_S:
            raise
        note(_not_soon(place, str(error).splitlines()[0]))
        return connect_patiently(address, secret, limit_s - SOON_S)
    store.set_timeout(timedelta(seconds=limit_s))
    return store


def _not_soon(place: LaunchPlace, reason: str) -> str:
    advice = "Does it run, and does a firewall let this port through?"
    with suppress(OSError):
        if not place.world.on_one_host and socket.gethostbyname(place.address).startswith("127."):
            advice = (
                f"{place.address} is this host itself: if worker 0 is on another one, set MASTER_ADDR to an address of "
                "that host"
            )
    return f"worker {place.world.rank} has not found worker 0 in {SOON_S:g} s, and looks on: {reason}. {advice}"


def _listener(place: LaunchPlace) -> socket.socket:
    """On one host nobody from outside can connect."""
    if place.listen_fd is not None:
        return socket.socket(fileno=place.listen_fd)
    return socket.create_server((LOOPBACK if place.world.on_one_host else "", place.port))


def _explain(place: LaunchPlace, timeout_s: float, error: Exception) -> str:
    rank, reason = place.world.rank, str(error).splitlines()[0]
    if rank == 0 and not place.agent_store:
        return (
            f"worker 0 cannot listen at {place.address}:{place.port}: {reason}. "
            "Set MASTER_PORT to a free port, the same for every worker"
        )
    host = "the launcher's store" if place.agent_store else "worker 0"
    return (
        f"worker {rank} found {host} not at {place.address}:{place.port} within {timeout_s:g} s: {reason} "
        "Check that it runs, and that MASTER_ADDR and MASTER_PORT are the same for every worker"
    )
