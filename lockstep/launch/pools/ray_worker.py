"""One worker of a Ray pool: the actor on its node, and what the launcher knows of it.

An actor holds the worker's resources, starts its process (`HostedWorker`) and answers the launcher's questions. This
module imports Ray.
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from lockstep.errors import BadEnvironment
from lockstep.launch.channels.failure import RAISED, Failure
from lockstep.launch.channels.status import StatusRow
from lockstep.launch.channels.traceback_lines import Frame
from lockstep.launch.host.addresses import GLOO_INTERFACE, free_port, interface_of
from lockstep.launch.pool import ExitStatus, WorkerEvent
from lockstep.launch.pools.hosted_worker import HostedWorker, StartedWorker, WorkerNews, WorkerOrder, moved
from lockstep.launch.pools.output import Log
from lockstep.launch.pools.ray_cluster import why_lost
from lockstep.settings.environment import process_environment

UNREACHED_S = 30.0
"""A worker whose actor cannot be reached for so long counts as lost."""

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

    def ask(self, method: str, *arguments: Any) -> Any:
        """What this method of the `HostedWorker` returns; None while there is none."""
        return None if self._hosted is None else getattr(self._hosted, method)(*arguments)


ACTOR = ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=8)(WorkerActor)


@dataclass(eq=False)
class RayWorker:
    """A worker as the launcher sees it."""

    slot: int
    actor: Any
    place: ActorPlace
    log: Log
    id: str = ""
    """Empty until its process runs."""
    news: WorkerNews = field(default_factory=WorkerNews)
    """The last that was heard of it, on its own host's clock."""
    row: StatusRow = field(default_factory=StatusRow)
    """The row of the news, on this host's clock."""
    offset_ns: int = 0
    report: Failure | None = None
    unreached_since_s: float | None = None

    def ask(self, method: str, *arguments: Any) -> Any:
        """Asks its `HostedWorker`; gives Ray's reference to the answer."""
        return self.actor.ask.remote(method, *arguments)

    def take(self, news: WorkerNews) -> None:
        """A row that has not changed keeps its times: an idle worker must be seen to be idle."""
        if news.row != self.news.row:
            self.offset_ns = time.monotonic_ns() - news.clock_ns
            self.row = moved(news.row, self.offset_ns)
        if news.report is not None and self.report is None:
            self.report = replace(news.report, worker_id=self.id, time_s=news.report.time_s + self.offset_ns / 1e9)
        self.news = replace(news, output=b"")

    def event(self, status: ExitStatus | None = None, time_s: float = 0.0) -> WorkerEvent:
        return WorkerEvent(self.slot, self.id, self.report, status, time_s)

    def may_be_reached_again(self, now_s: float) -> bool:
        self.unreached_since_s = self.unreached_since_s or now_s
        return now_s - self.unreached_since_s < UNREACHED_S


def lost(error: BaseException) -> ExitStatus:
    """How a worker ended whose actor is gone."""
    return ExitStatus("SIGKILL", is_killed=True, reason=why_lost(error))


def refused(slot: int, actor: Any, why: str) -> WorkerEvent:
    """The end of a worker that cannot be started, which another one could not either."""
    name, now_s = f"actor {actor._actor_id.hex()[:8]}", time.monotonic()
    report = Failure(slot, None, BadEnvironment.__name__, why, (), False, now_s, RAISED, name)
    return WorkerEvent(slot, name, report, ExitStatus("3"), now_s)


@dataclass(frozen=True)
class PendingStack:
    """See `StackQuery`."""

    future: "Future[Frame | None]"

    def answer(self) -> Frame | None:
        is_there = self.future.done() and self.future.exception() is None
        return self.future.result() if is_there else None
