"""The pool of `lockstep run --on ray`: each worker is a process beside a Ray actor (`ray_worker`), on any node.

The launcher keeps one question for news open at each actor; its answers end the wait in `wait`. So the supervisor sees
a worker of another host as it sees one of this host, about a tenth of a second later.

# Note [What dies with what]
# The actors belong to the launcher's Ray job: when the launcher ends, in whatever way, Ray ends them. A worker's
# process dies with its actor (Note [The parent is a thread] in hosted_worker.py), and its children by the guard of
# orphans. When a node is lost, Ray reports the actor as dead, and the worker counts as killed.

This module imports Ray: only the command line does so, when it is asked for.
"""

import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

from ray.exceptions import ActorUnavailableError, RayTaskError

from lockstep.errors import BadEnvironment
from lockstep.launch.channels.failure import note_of_worker
from lockstep.launch.channels.status import StatusRow
from lockstep.launch.host.addresses import is_loopback
from lockstep.launch.host.processes import Activity
from lockstep.launch.host.signals import LauncherSignals
from lockstep.launch.job import RESUME, Job
from lockstep.launch.pool import OpenPool, WorkerEvent, speaking_slot
from lockstep.launch.pools.hosted_worker import StartedWorker, WorkerNews, WorkerOrder
from lockstep.launch.pools.output import Logs
from lockstep.launch.pools.ray_actors import ActorAnswers, Reservation, Reservations, kill_actors
from lockstep.launch.pools.ray_cluster import RayRequest, connected, why_lost
from lockstep.launch.pools.ray_worker import PendingStack, RayWorker, lost, refused
from lockstep.settings.environment import ADDRESS, make_secret, process_environment
from lockstep.settings.environments.lockstep_run import SECRET

NEWS_S = 0.2
"""How often an actor reports a worker that does nothing else than change its row."""
END_S = 5.0
STACK_S = 1.0

_OF_THE_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH")
"""Variables of the launcher that workers get, besides those of lockstep. Others are the node's own."""


class RayPool:
    """See `WorkerPool`. Owns the actors and the logs of one launch."""

    obstacles: Collection[str] = ()

    def __init__(
        self,
        job: Job,
        show: Callable[[bytes], None],
        say: Callable[[str], None],
        signals: LauncherSignals,
        *,
        request: RayRequest,
    ) -> None:
        checkpoints = None if job.checkpoints is None else job.checkpoints.absolute()
        self._job = replace(job, run_dir=job.run_dir.absolute(), checkpoints=checkpoints)
        self._show, self._say, self._signals, self._request = show, say, signals, request
        self._workers: dict[int, RayWorker] = {}
        self._past: list[RayWorker] = []
        """Workers that have ended, until nothing of them is left."""
        self._rows: dict[int, StatusRow] = {}
        """The last row in every slot."""
        self._given_up: set[int] = set()
        self._speaker: RayWorker | None = None
        self._events: list[WorkerEvent] = []
        self._meeting = ("", (0, 0))
        """The address of worker 0, and its two ports."""
        self._num_workers = job.num_workers
        self._extra: dict[str, str] = {}
        self._secret = process_environment().get(SECRET) or make_secret()
        self._has_said_apart = False
        self._unreached: list[RayWorker] = []
        self._next_try_s = 0.0

    def __enter__(self) -> "RayPool":
        with ExitStack() as owned:
            owned.enter_context(connected(self._request))
            self._answers = owned.enter_context(closing(ActorAnswers(self._signals)))
            self._joiners = Reservations(self._answers, self._request, self._say, self._start_joiner)
            self._logs = owned.enter_context(closing(Logs(self._job.run_dir, self._say)))
            self._marker = owned.enter_context(marked(self._job.run_dir))
            owned.callback(self.end_all)
            self._owned = owned.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._owned.close()

    # -- starting workers ----------------------------------------------------------------------------------------

    def start(self, num_workers: int, resume: str | None = None) -> None:
        """Founders are numbered node by node, when all have a place. A signal that ends the launch ends the wait."""
        self._num_workers = num_workers
        self._extra = {} if resume is None else {RESUME: resume}
        self._given_up.clear()
        self._rows.clear()
        places = self._joiners.await_founders(num_workers, self._signals)
        if not places:
            return
        addresses = [place.address for _, place in places]
        places.sort(key=lambda pair: addresses.index(pair[1].address))
        self._meeting = (places[0][1].address, places[0][1].ports)
        founders = [RayWorker(slot, actor, place, self._logs.of(slot)) for slot, (actor, place) in enumerate(places)]
        self._workers = {founder.slot: founder for founder in founders}
        self._speaker = founders[0]
        for founder in founders:
            self._start(founder)
        while not all(founder.id for founder in founders if founder in self._workers.values()):
            self._answers.wait(1.0)
        reports = [event.report for event in self._events if event.report is not None]
        for report in reports:
            if report.kind == BadEnvironment.__name__:
                self.end_all()
                raise BadEnvironment(f"worker {report.rank} cannot be started: {report.message}")

    def replace(self, slot: int, endpoints: tuple[str, ...], num_workers: int) -> None:
        self._num_workers = num_workers
        self._joiners.cancel(slot)
        if slot in self._workers:
            self._end_now([self._workers.pop(slot)])
        self._rows.pop(slot, None)
        if slot in self._given_up:
            self._set_given_up(slot, False)
        self._joiners.add(slot, endpoints)

    def keep_spares(self, number: int) -> None:
        """There are none: a spare would hold the resources of a worker."""

    def _start_joiner(self, joiner: Reservation) -> None:
        assert joiner.slot is not None
        if joiner.place is None:
            self._report_unstarted(joiner.slot, joiner.actor, joiner.error or RuntimeError())
            return
        # Where members listen now, at addresses that other nodes reach: the supervisor knows ports alone.
        members = [(worker.place.address, worker.row) for worker in self._workers.values() if worker.row.is_member]
        endpoints = tuple(f"{address}:{row.endpoint_port}" for address, row in members if row.endpoint_port)
        worker = RayWorker(joiner.slot, joiner.actor, joiner.place, self._logs.of(joiner.slot))
        self._start(worker, endpoints or joiner.endpoints)

    def _start(self, worker: RayWorker, endpoints: tuple[str, ...] = ()) -> None:
        self._workers[worker.slot] = worker
        own = worker.place.address
        neighbours = sorted(slot for slot, other in self._workers.items() if other.place.address == own)
        address, ports = self._meeting
        order = WorkerOrder(
            job=self._job,
            slot=worker.slot,
            num_workers=self._num_workers,
            address=address,
            ports=ports,
            local_rank=neighbours.index(worker.slot),
            local_size=len(neighbours),
            endpoints=endpoints,
            secret=self._secret,
            variables={**inherited_variables(), **self._extra, ADDRESS: "" if is_loopback(own) else own},
            folder=os.getcwd(),
            marker=self._marker,
            given_up=frozenset(self._given_up),
        )
        self._answers.ask(worker.actor.start.remote(order), partial(self._answered, worker, self._follow))

    def _follow(self, worker: RayWorker, started: StartedWorker) -> None:
        worker.id = f"pid {started.pid} on {worker.place.address}"
        if not started.shares_folder and not self._has_said_apart:
            self._has_said_apart = True
            self._say(
                f"! {worker.place.address} does not see the folder {self._job.run_dir} of this host: checkpoints of a "
                "worker there stay there. Name a folder that all hosts share (--checkpoints, or --run-dir)"
            )
        self._ask_for_news(worker)

    def _report_unstarted(self, slot: int, actor: Any, error: BaseException) -> None:
        """An error of its own would come again; a lost node is a loss like any other."""
        event = refused(slot, actor, str(error) if isinstance(error, BadEnvironment) else why_lost(error))
        if not isinstance(error, (BadEnvironment, RayTaskError)):
            event = replace(event, report=None, status=lost(error))
        self._events.append(event)
        kill_actors([actor])

    # -- following workers ---------------------------------------------------------------------------------------

    @property
    def running(self) -> Mapping[int, str]:
        return {slot: worker.id for slot, worker in self._workers.items() if worker.id}

    def wait(self, within_s: float) -> list[WorkerEvent]:
        if not self._events:
            self._answers.wait(within_s)
        if self._unreached and (now_s := time.monotonic()) >= self._next_try_s:
            self._next_try_s = now_s + NEWS_S
            unreached, self._unreached = self._unreached, []
            for worker in unreached:
                self._ask_for_news(worker)
        self._joiners.report_late()
        events, self._events = self._events, []
        return events

    def _ask_for_news(self, worker: RayWorker) -> None:
        self._answers.ask(worker.ask("news", NEWS_S), partial(self._answered, worker, self._learn))

    def _answered(self, worker: RayWorker, then: Callable[[RayWorker, Any], None], future: "Future[Any]") -> None:
        if self._workers.get(worker.slot) is not worker:
            return  # it was dismissed
        error = future.exception()
        if error is None:
            worker.unreached_since_s = None
            then(worker, future.result())
        elif not worker.id:
            del self._workers[worker.slot]
            self._report_unstarted(worker.slot, worker.actor, error)
        elif isinstance(error, ActorUnavailableError) and worker.may_be_reached_again(time.monotonic()):
            self._unreached.append(worker)
        else:
            del self._workers[worker.slot]
            self._events.append(worker.event(lost(error), time.monotonic()))
            kill_actors([worker.actor])

    def _learn(self, worker: RayWorker, news: WorkerNews) -> None:
        is_reported = worker.report is not None
        self._take(worker, news)
        if news.status is not None:
            worker.log.end(worker.report)
            self._events.append(worker.event(news.status, news.ended_s + worker.offset_ns / 1e9))
            del self._workers[worker.slot]
            self._end_and_forget(worker)
        else:
            if worker.report is not None and not is_reported:
                self._events.append(worker.event())
            self._ask_for_news(worker)

    def _take(self, worker: RayWorker, news: WorkerNews) -> None:
        worker.take(news)
        if self._workers.get(worker.slot) is worker:
            self._rows[worker.slot] = worker.row
        slot = speaking_slot({slot: other.row for slot, other in self._workers.items()})
        if slot is not None:  # while no member has rank 0, the last speaker stays
            self._speaker = self._workers[slot]
        for note in news.notes if worker is not self._speaker else ():
            self._say(note_of_worker(worker.slot, note))
        if news.output:
            worker.log.write(news.output)
            if worker is self._speaker:
                self._show(news.output)

    # -- what is known of them -----------------------------------------------------------------------------------

    def row(self, slot: int) -> StatusRow:
        return self._rows.get(slot, StatusRow())

    def rows(self) -> Mapping[int, StatusRow]:
        return {slot: row for slot, row in self._rows.items() if row.has_started}

    def give_up(self, slot: int) -> None:
        if slot not in self._workers and slot not in self._given_up:
            self._set_given_up(slot, True)

    def _set_given_up(self, slot: int, is_given_up: bool) -> None:
        (self._given_up.add if is_given_up else self._given_up.discard)(slot)
        for worker in self._workers.values():
            worker.ask("set_given_up", slot, is_given_up)

    def state(self, slot: int) -> str:
        return self._workers[slot].news.state

    def activity(self, slot: int) -> Activity | None:
        return self._workers[slot].news.activity

    def ask_stack(self, slot: int) -> PendingStack:
        return PendingStack(self._workers[slot].ask("stack", STACK_S).future())

    # -- ending workers ------------------------------------------------------------------------------------------

    def send(self, slot: int, signum: Signals) -> None:
        if slot in self._workers:
            self._workers[slot].ask("send", signum)

    def end(self, slot: int) -> None:
        self._joiners.cancel(slot)
        if slot in self._workers:
            self._workers[slot].ask("end")

    def end_all(self) -> None:
        self._joiners.cancel()
        workers, self._workers = list(self._workers.values()), {}
        self._end_now(workers)
        self._events = []

    def _end_now(self, workers: Collection[RayWorker]) -> None:
        """Kills the workers and waits until nothing of them, and of those that ended before, is left."""
        for worker in workers:
            self._end_and_forget(worker)
        deadline_s = time.monotonic() + 2 * END_S
        while self._past and (left_s := deadline_s - time.monotonic()) > 0:
            self._answers.wait(min(left_s, 1.0))
        kill_actors(worker.actor for worker in self._past)
        self._past = []

    def _end_and_forget(self, worker: RayWorker) -> None:
        self._past.append(worker)
        self._answers.ask(worker.ask("end_and_join", END_S), partial(self._clear_away, worker))

    def _clear_away(self, worker: RayWorker, future: "Future[WorkerNews | None]") -> None:
        """Writes the last output of a worker, and gives its resources back."""
        if worker in self._past:
            self._past.remove(worker)
            last = None if future.exception() is not None else future.result()
            if last is not None:
                self._take(worker, last)
            kill_actors([worker.actor])


@contextmanager
def marked(folder: Path) -> Iterator[str]:
    """The name of a file that is in the folder for a while: hosts that see it share the folder with this one."""
    mark = folder / f".{secrets.token_hex(8)}"
    with suppress(OSError):
        mark.touch()
    try:
        yield mark.name
    finally:
        with suppress(OSError):
            mark.unlink(missing_ok=True)


def inherited_variables() -> dict[str, str]:
    inherited = process_environment()
    return {name: value for name, value in inherited.items() if name.startswith("LOCKSTEP_") or name in _OF_THE_USER}


def pool_for(options: Mapping[str, Any]) -> OpenPool:
    """The pool for these options of the command line."""
    request = RayRequest(
        address=options.get("--address"),
        cpus=options.get("--cpus-per-worker", 1.0),
        gpus=options.get("--gpus-per-worker", 0.0),
        placement=options.get("--placement", "pack"),
    )
    return partial(RayPool, request=request)
