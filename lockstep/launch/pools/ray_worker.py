"""One worker of a Ray pool: the actor on its node, and what the launcher knows of it.

An actor holds the worker's resources, starts its process (`HostedWorker`) and answers the launcher's questions. This
module imports Ray.
"""

import signal
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from lockstep.launch.channels.failure import Failure
from lockstep.launch.channels.status import StatusRow
from lockstep.launch.channels.traceback_lines import Frame
from lockstep.launch.host.addresses import GLOO_INTERFACE, free_port, interface_of
from lockstep.launch.host.processes import Activity
from lockstep.launch.pools.hosted_worker import HostedWorker, StartedWorker, WorkerNews, WorkerOrder
from lockstep.launch.pools.output import Log
from lockstep.settings.environment import process_environment

_OF_RAY = ("OMP_NUM_THREADS",)
"""Ray sets these for its actors, after the number of their cores: it must not change the bits."""


@dataclass(frozen=True)
class ActorPlace:
    """Where an actor is: the address of its node, and two ports that are free there."""

    address: str
    ports: tuple[int, int]


class WorkerActor:
    """What runs in a Ray actor. Its methods may run at the same time."""

    def __init__(self) -> None:
        self._hosted: HostedWorker | None = None

    def place(self) -> ActorPlace:
        return ActorPlace(ray.util.get_node_ip_address(), (free_port(), free_port()))

    def start(self, order: WorkerOrder) -> StartedWorker:
        inherited = {name: value for name, value in process_environment().items() if name not in _OF_RAY}
        interface = interface_of(ray.util.get_node_ip_address())
        self._hosted = HostedWorker(order, {**({GLOO_INTERFACE: interface} if interface else {}), **inherited})
        return self._hosted.started

    def news(self, within_s: float) -> WorkerNews:
        assert self._hosted is not None
        return self._hosted.news(within_s)

    def send(self, signum: int) -> None:
        if self._hosted is not None:
            self._hosted.send(signal.Signals(signum))

    def end(self) -> None:
        if self._hosted is not None:
            self._hosted.end()

    def end_and_join(self, within_s: float) -> WorkerNews | None:
        """The last news, after nothing of the worker is left."""
        if self._hosted is None:
            return None
        self._hosted.end()
        self._hosted.join(within_s)
        return self._hosted.news(0.0)

    def set_given_up(self, slot: int, is_given_up: bool) -> None:
        if self._hosted is not None:
            (self._hosted.give_up if is_given_up else self._hosted.restore)(slot)

    def stack(self, within_s: float) -> Frame | None:
        return None if self._hosted is None else self._hosted.stack(within_s)


ACTOR = ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=8)(WorkerActor)


def kill_actors(actors: Iterable[Any]) -> None:
    for actor in actors:
        with suppress(RayError, ValueError):  # it is gone already
            ray.kill(actor, no_restart=True)


@dataclass(eq=False)
class Reservation:
    """An actor that has no worker yet; `place` is None until the cluster has found one."""

    actor: Any
    asked_s: float
    endpoints: tuple[str, ...] = ()
    place: ActorPlace | None = None
    error: BaseException | None = None
    is_reported: bool = False


@dataclass(eq=False)
class RayWorker:
    """A worker as the launcher sees it."""

    slot: int
    actor: Any
    place: ActorPlace
    log: Log
    id: str = ""
    """Empty until its process runs."""
    row: StatusRow = field(default_factory=StatusRow)
    raw_row: StatusRow = field(default_factory=StatusRow)
    """The same on its own host's clock."""
    offset_ns: int = 0
    state: str = ""
    activity: Activity | None = None
    report: Failure | None = None
    unreached_since_s: float | None = None


@dataclass(frozen=True)
class PendingStack:
    """See `StackQuery`."""

    future: "Future[Frame | None]"

    def answer(self) -> Frame | None:
        is_there = self.future.done() and self.future.exception() is None
        return self.future.result() if is_there else None
