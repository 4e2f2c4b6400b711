"""The Ray cluster of a launch: what is asked of it, and the connection to it."""

import logging
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import services

from lockstep.errors import BadArgument, BadEnvironment
from lockstep.settings.environment import process_environment

NAMESPACE = "lockstep"
"""Of the actors that have names."""
PROBE_S = 3.0
LOCAL = "local"
"""The address that starts a cluster of this host alone, for as long as the launch."""
PLACEMENTS = {"pack": "DEFAULT", "spread": "SPREAD"}
"""Ray's names for ways to place actors."""

_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS_FRAME, _FRAME_KIND = 4, 3


@dataclass(frozen=True)
class RayRequest:
    """Which cluster, and what each worker needs of it. `address` None: the cluster of this host."""

    address: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    placement: str = "pack"

    def options(self) -> dict[str, Any]:
        """What Ray is asked for each worker's actor."""
        return {
            "num_cpus": self.cpus,
            "num_gpus": self.gpus,
            "scheduling_strategy": PLACEMENTS[self.placement],
        }

    def in_words(self) -> str:
        cpus = f"{self.cpus:g} CPU" + ("" if self.cpus == 1 else "s")
        return cpus if not self.gpus else f"{cpus} and {self.gpus:g} GPU" + ("" if self.gpus == 1 else "s")


@contextmanager
def connected(request: RayRequest) -> Iterator[None]:
    """Inside, this process belongs to the cluster. Raises BadEnvironment, soon, if there is none at the address.

    A connection that this process had already is used, and kept.
    """
    if ray.is_initialized():
        yield
        return
    address = find_address(request.address)
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        _connect(address)
        for signum, handler in handlers.items():  # Ray takes SIGTERM for itself
            signal.signal(signum, handler)
        yield
    finally:
        ray.shutdown()


def _connect(address: str) -> None:
    path = process_environment().get("PYTHONPATH")
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,  # the workers' output comes by their actors
            logging_level=logging.ERROR,
            include_dashboard=False if address == LOCAL else None,
            runtime_env={"env_vars": {"PYTHONPATH": path}} if path else None,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise BadEnvironment(
            f"the Ray cluster at {address} cannot be joined: {first_line(error)}. If it asks for Ray's token, set "
            "RAY_AUTH_MODE=token here too"
        ) from error


def find_address(asked: str | None) -> str:
    """The address of a cluster's head at which something answers as Ray does."""
    if asked == LOCAL:
        return LOCAL
    if asked is not None and not re.fullmatch(r"(auto|[^:/\s]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5})", asked):
        raise BadArgument(
            f"--address {asked} cannot be used: give host:port of the head as `ray start --head` shows it, auto or "
            "local. A Ray client's address (ray://) cannot: start the launcher on a node of the cluster, for example "
            "with `ray job submit`"
        )
    try:
        address: str = services.canonicalize_bootstrap_address_or_die(asked or "auto")
    except (ConnectionError, ValueError) as error:
        raise BadEnvironment(
            "no Ray cluster was found from this host: start one with `ray start --head`, give --address host:port of "
            f"its head, or --address {LOCAL} for one of this host alone"
        ) from error
    _probe(asked if asked not in (None, "auto") else address)
    return address


def _probe(address: str) -> None:
    """Raises unless an HTTP/2 server answers: Ray itself would try for most of a minute."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PROBE_S) as connection:
            if process_environment().get("RAY_USE_TLS", "0") in ("1", "true"):
                return  # it answers only to certificates
            connection.settimeout(PROBE_S)
            connection.sendall(_HTTP2_PREFACE)
            answer = connection.recv(9)
    except OSError as error:
        why = "it does not answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise BadEnvironment(f"there is no Ray cluster at {address}: {why}. {_ADVICE}") from error
    if len(answer) <= _FRAME_KIND or answer[_FRAME_KIND] != _SETTINGS_FRAME:
        raise BadEnvironment(f"what listens at {address} is not the head of a Ray cluster. {_ADVICE}")


_ADVICE = "Give --address host:port as `ray start --head` shows it (the port is 6379 by default)"


def waiting_message(num_waiting: int, request: RayRequest, waited_s: float) -> str:
    """What is said of workers for which the cluster has no place yet."""
    workers = "1 worker has" if num_waiting == 1 else f"{num_waiting} workers have"
    each = f"each needs {request.in_words()} of the Ray cluster"
    return f"! {workers} not started after {waited_s:g} s: {each}, where {_free_in_words()}"


def _free_in_words() -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    parts = [f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}s" for name in ("CPU", "GPU") if total.get(name)]
    return f"{' and '.join(parts) or 'no CPUs'} are free"


def why_lost(error: BaseException) -> str:
    """Why Ray says that an actor is gone, in a few words."""
    text = str(error)
    with suppress(StopIteration):
        return next(words for sign, words in _SIGNS.items() if sign in text)
    return first_line(error)


_SIGNS = {
    "low on memory": "out of memory",
    "node has died": "its Ray node is gone",
    "node was": "its Ray node is gone",
    "worker process has died": "its Ray actor was killed",
    "killed by": "its Ray actor was killed",
}


def first_line(error: BaseException) -> str:
    """What Ray says of an error, without its traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
