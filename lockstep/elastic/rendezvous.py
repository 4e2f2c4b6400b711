"""The store at which the workers of a run meet.

# Note [Only loopback]
# A TCPStore that is told "127.0.0.1" still listens on every interface. On one host the store is therefore
# given a socket that is already bound to loopback and listens; that also ends races for a port.

# Note [One store for all runs]
# A script may start several runs. The first opens the store, and it stays open as long as the process: worker 0 could
# not listen at the same port again before all others have left it. Each run has a part of the store to itself.
"""

import os
import socket
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lockstep.errors import BadEnvironment
from lockstep.settings.environments.place import LOOPBACK, LaunchPlace

_opened: dict[LaunchPlace, Store] = {}
_of_parents: list[Store] = []
"""The stores of the process that this one was forked from: to end them would be to wait for its threads."""


def open_store(place: LaunchPlace, timeout_s: float, run: int = 0) -> Store:
    """The store that all workers of a run share. Collective: returns once worker 0, or the agent, answers.

    `timeout_s` bounds the wait here, and is the store's own limit for every later wait. `run` counts the runs of the
    script. See Note [One store for all runs].
    """
    timeout = timedelta(seconds=timeout_s)
    if place not in _opened:
        try:
            _opened[place] = _open(place, timeout)
        except (OSError, RuntimeError) as error:  # torch's network errors are RuntimeErrors
            raise BadEnvironment(_explain(place, timeout_s, error)) from error
    _opened[place].set_timeout(timeout)
    return PrefixStore(f"run/{run}", _opened[place])


def _leave_to_parent() -> None:
    _of_parents.extend(_opened.values())
    _opened.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _open(place: LaunchPlace, timeout: timedelta) -> Store:
    if place.port == 0:
        return HashStore()
    if place.agent_store:
        # The agent keeps its own keys there, and may keep the store over a restart.
        return PrefixStore(f"lockstep/{place.world.generation}", _connect(place.address, place, timeout))
    if place.world.rank != 0:
        return _connect(LOOPBACK if place.world.on_one_host else place.address, place, timeout)
    return _host(place, timeout)


def _connect(address: str, place: LaunchPlace, timeout: timedelta) -> Store:
    return TCPStore(address, place.port, place.world.size, False, timeout, wait_for_workers=False)


def _host(place: LaunchPlace, timeout: timedelta) -> Store:
    """See Note [Only loopback]. The store owns the socket from here on."""
    if not place.world.on_one_host:
        return TCPStore(place.address, place.port, place.world.size, True, timeout, wait_for_workers=False)
    listen_fd = _listen(place.port) if place.listen_fd is None else place.listen_fd
    return TCPStore(
        LOOPBACK,
        place.port,
        place.world.size,
        True,
        timeout,
        wait_for_workers=False,
        multi_tenant=False,
        master_listen_fd=listen_fd,
    )


def _listen(port: int) -> int:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen()
        return listener.detach()


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
