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
import queue
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ray.exceptions import ActorUnavailableError, RayTaskError

from lockstep.errors import BadEnvironment
from lockstep.launch.channels.failure import RAISED, Failure, note_of_worker
from lockstep.launch.channels.status import StatusRow
from lockstep.launch.host.addresses import is_loopback
from lockstep.launch.host.processes import Activity
from lockstep.launch.host.signals import SCALE, LauncherSignals
from lockstep.launch.job import RESUME, Job
from lockstep.launch.pool import ExitStatus, OpenPool, WorkerEvent, speaking_slot
from lockstep.launch.pools.hosted_worker import StartedWorker, WorkerNews, WorkerOrder, moved
from lockstep.launch.pools.output import Logs
from lockstep.launch.pools.ray_cluster import RayRequest, connected, waiting_message, why_lost
from lockstep.launch.pools.ray_worker import ACTOR, ActorPlace, PendingStack, RayWorker, Reservation, kill_actors
from lockstep.settings.environment import ADDRESS, make_secret, process_environment
from lockstep.settings.environments.lockstep_run import SECRET

NEWS_S = 0.2
"""How often an actor reports a worker that does nothing else than change its row."""
END_S = 5.0
UNPLACED_S = 20.0
"""Workers that wait for a place in the cluster for so long are reported."""
UNREACHED_S = 30.0
"""A worker whose actor cannot be reached for so long counts as lost."""
STACK_S = 1.0

_OF_THE_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH")
"""Variables of the launcher that workers get, besides those of lockstep. Others are the node's own."""


class RayPool:
    """See `WorkerPool`. Owns the actors and the logs of one launch."""

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
        self._reserved: dict[int, Reservation] = {}
        """For joiners, by slot."""
        self._workers: dict[int, RayWorker] = {}
        self._past: list[RayWorker] = []
        """Workers that have ended, until nothing of them is left."""
        self._rows: dict[int, StatusRow] = {}
        """The last row in every slot."""
        self._given_up: set[int] = set()
        self._speaker: RayWorker | None = None
        self._events: list[WorkerEvent] = []
        self._answers: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._marker = f".{secrets.token_hex(8)}"
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
            self._selector = owned.enter_context(selectors.DefaultSelector())
            self._wake, self._woken = socket.socketpair()
            for end in (self._wake, self._woken):
                end.setblocking(False)
                owned.callback(end.close)
            self._logs = owned.enter_context(closing(Logs(self._job.run_dir, self._say)))
            self._mark_folder(owned)
            owned.callback(self.end_all)
            self._selector.register(self._signals, selectors.EVENT_READ)
            self._selector.register(self._woken, selectors.EVENT_READ)
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
        founders = [self._reserve() for _ in range(num_workers)]
        try:
            is_whole = self._await_places(founders)
        except BaseException:
            kill_actors(founder.actor for founder in founders)
            raise
        if is_whole:
            self._found(founders)
        else:
            kill_actors(founder.actor for founder in founders)

    def replace(self, slot: int, endpoints: tuple[str, ...], num_workers: int) -> None:
        self._num_workers = num_workers
        self._cancel(slot)
        if slot in self._workers:
            self._end_now([self._workers.pop(slot)])
        self._rows.pop(slot, None)
        if slot in self._given_up:
            self._set_given_up(slot, False)
        self._reserved[slot] = self._reserve(endpoints)

    def keep_spares(self, number: int) -> None:
        """There are none: a spare would hold the resources of a worker."""

    def _reserve(self, endpoints: tuple[str, ...] = ()) -> Reservation:
        actor = ACTOR.options(**self._request.options()).remote()
        reservation = Reservation(actor, time.monotonic(), endpoints)
        self._ask(actor.place.remote(), partial(self._take_place, reservation))
        return reservation

    def _take_place(self, reservation: Reservation, future: "Future[ActorPlace]") -> None:
        reservation.error = future.exception()
        reservation.place = None if reservation.error is not None else future.result()
        slot = next((slot for slot, other in self._reserved.items() if other is reservation), None)
        if slot is None:
            return  # a founder, or it was cancelled
        del self._reserved[slot]
        if reservation.place is None:
            self._report_unstarted(slot, reservation.actor, reservation.error)
        else:
            joiner = RayWorker(slot, reservation.actor, reservation.place, self._logs.of(slot))
            self._start(joiner, self._endpoints() or reservation.endpoints)

    def _await_places(self, founders: list[Reservation]) -> bool:
        """Whether all founders have a place; False if a signal ends the launch first."""
        seen: list[signal.Signals] = []
        while not all(founder.place for founder in founders):
            self._turn(1.0)
            self._report_waiting(founders)
            for founder in founders:
                if founder.error is not None:
                    raise BadEnvironment(f"Ray cannot start a worker: {why_lost(founder.error)}") from founder.error
            seen += self._signals.take()
            if any(signum != SCALE for signum in seen):
                break
        for signum in seen:
            self._signals.add(signum)
        return all(founder.place for founder in founders)

    def _found(self, founders: list[Reservation]) -> None:
        places = [(founder.actor, founder.place) for founder in founders if founder.place is not None]
        addresses = [place.address for _, place in places]
        places.sort(key=lambda pair: addresses.index(pair[1].address))
        self._meeting = (places[0][1].address, places[0][1].ports)
        workers = [RayWorker(slot, actor, place, self._logs.of(slot)) for slot, (actor, place) in enumerate(places)]
        self._workers = {worker.slot: worker for worker in workers}
        self._speaker = workers[0]
        for worker in workers:
            self._start(worker)
        while not all(worker.id for worker in workers if worker in self._workers.values()):
            self._turn(1.0)
        refused = [
            event.report for event in self._events if event.report is not None and event.report.kind == "BadEnvironment"
        ]
        if refused:
            self.end_all()
            raise BadEnvironment(f"worker {refused[0].rank} cannot be started: {refused[0].message}")

    def _endpoints(self) -> tuple[str, ...]:
        """Where members listen now, at addresses that other nodes reach: the supervisor knows ports alone."""
        rows = [(worker.place.address, worker.row) for worker in self._workers.values() if worker.row.is_member]
        return tuple(f"{address}:{row.endpoint_port}" for address, row in rows if row.endpoint_port)

    def _start(self, worker: RayWorker, endpoints: tuple[str, ...] = ()) -> None:
        self._workers[worker.slot] = worker
        neighbours = sorted(
            slot for slot, other in self._workers.items() if other.place.address == worker.place.address
        )
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
            variables={**self._variables(), ADDRESS: "" if is_loopback(worker.place.address) else worker.place.address},
            folder=os.getcwd(),
            marker=self._marker,
            given_up=frozenset(self._given_up),
        )
        self._ask(worker.actor.start.remote(order), partial(self._answered, worker, self._follow))

    def _variables(self) -> dict[str, str]:
        inherited = process_environment()
        names = [name for name in inherited if name.startswith("LOCKSTEP_") or name in _OF_THE_USER]
        return {**{name: inherited[name] for name in names}, **self._extra}

    def _follow(self, worker: RayWorker, started: StartedWorker) -> None:
        worker.id = f"pid {started.pid} on {worker.place.address}"
        if not started.shares_folder and not self._has_said_apart:
            self._has_said_apart = True
            self._say(
                f"! {worker.place.address} does not see the folder {self._job.run_dir} of this host: checkpoints of a "
                "worker there stay there. Name a folder that all hosts share (--checkpoints, or --run-dir)"
            )
        self._ask_for_news(worker)

    def _report_unstarted(self, slot: int, actor: Any, error: BaseException | None) -> None:
        """An error of its own would come again; a lost node is a loss like any other."""
        name, now_s = f"actor {actor._actor_id.hex()[:8]}", time.monotonic()
        why = error if isinstance(error, BadEnvironment) else None
        if why is None and not isinstance(error, RayTaskError):
            status = ExitStatus("SIGKILL", is_killed=True, reason=why_lost(error or RuntimeError()))
            self._events.append(WorkerEvent(slot, name, None, status, now_s))
        else:
            report = Failure(
                slot,
                None,
                "BadEnvironment",
                str(why or why_lost(error or RuntimeError())),
                (),
                False,
                now_s,
                RAISED,
                name,
            )
            self._events.append(WorkerEvent(slot, name, report, ExitStatus("3"), now_s))
        kill_actors([actor])

    def _report_waiting(self, reservations: Collection[Reservation]) -> None:
        due_s = time.monotonic() - UNPLACED_S
        late = [one for one in reservations if one.place is None and not one.is_reported and one.asked_s <= due_s]
        if late:
            self._say(waiting_message(len(late), self._request, UNPLACED_S))
        for one in late:
            one.is_reported = True

    def _mark_folder(self, owned: ExitStack) -> None:
        """Workers that see the mark share the folder with this host."""
        mark = self._job.run_dir / self._marker
        with suppress(OSError):
            mark.touch()
            owned.callback(partial(mark.unlink, missing_ok=True))

    # -- questions to actors -------------------------------------------------------------------------------------

    def _ask(self, reference: Any, answered: Callable[["Future[Any]"], None]) -> None:
        """Calls `answered` when there is an answer or an error: in this thread, during `_turn`."""
        reference.future().add_done_callback(partial(self._hand_over, answered))

    def _hand_over(self, answered: Callable[["Future[Any]"], None], future: "Future[Any]") -> None:
        """Called by a thread of Ray."""
        self._answers.put(partial(answered, future))
        with suppress(OSError):  # it is awake already, or the pool is closed
            self._wake.send(b".")

    def _turn(self, within_s: float) -> None:
        """Takes the answers that are there, after the first one, a signal, or `within_s`."""
        self._selector.select(max(0.0, within_s))
        with suppress(BlockingIOError):
            self._woken.recv(1 << 16)
        with suppress(queue.Empty):
            while True:
                self._answers.get_nowait()()

    def _answered(self, worker: RayWorker, then: Callable[[RayWorker, Any], None], future: "Future[Any]") -> None:
        if self._workers.get(worker.slot) is not worker:
            return  # it was dismissed
        error = future.exception()
        if error is None:
            worker.unreached_since_s = None
            then(worker, future.result())
        elif isinstance(error, ActorUnavailableError) and worker.id and self._is_patient_with(worker):
            self._unreached.append(worker)
        elif worker.id:
            self._lose(worker, error)
        else:
            del self._workers[worker.slot]
            self._report_unstarted(worker.slot, worker.actor, error)

    def _is_patient_with(self, worker: RayWorker) -> bool:
        now_s = time.monotonic()
        worker.unreached_since_s = worker.unreached_since_s or now_s
        return now_s - worker.unreached_since_s < UNREACHED_S

    def _ask_unreached(self) -> None:
        """Asks those again that could not be reached, a few times a second."""
        now_s = time.monotonic()
        if self._unreached and now_s >= self._next_try_s:
            self._next_try_s = now_s + NEWS_S
            unreached, self._unreached = self._unreached, []
            for worker in unreached:
                self._ask_for_news(worker)

    def _ask_for_news(self, worker: RayWorker) -> None:
        self._ask(worker.actor.news.remote(NEWS_S), partial(self._answered, worker, self._learn))

    # -- following workers ---------------------------------------------------------------------------------------

    @property
    def running(self) -> Mapping[int, str]:
        return {slot: worker.id for slot, worker in self._workers.items() if worker.id}

    @property
    def obstacles(self) -> Collection[str]:
        return ()

    def wait(self, within_s: float) -> list[WorkerEvent]:
        if not self._events:
            self._turn(within_s)
        self._ask_unreached()
        self._report_waiting(self._reserved.values())
        events, self._events = self._events, []
        return events

    def _learn(self, worker: RayWorker, news: WorkerNews) -> None:
        self._take_news(worker, news)
        if news.report is not None and worker.report is None:
            worker.report = replace(
                news.report, worker_id=worker.id, time_s=news.report.time_s + worker.offset_ns / 1e9
            )
            if news.status is None:
                self._events.append(WorkerEvent(worker.slot, worker.id, worker.report))
        if news.status is None:
            self._ask_for_news(worker)
        else:
            self._see_end(worker, news.status, news.ended_s + worker.offset_ns / 1e9)

    def _take_news(self, worker: RayWorker, news: WorkerNews) -> None:
        """A row that has not changed keeps its times: an idle worker must be seen to be idle."""
        if news.row != worker.raw_row:
            worker.offset_ns = time.monotonic_ns() - news.clock_ns
            worker.raw_row, worker.row = news.row, moved(news.row, worker.offset_ns)
            self._rows[worker.slot] = worker.row
        worker.state, worker.activity = news.state, news.activity
        self._settle_speaker()
        for note in news.notes if worker is not self._speaker else ():
            self._say(note_of_worker(worker.slot, note))
        if news.output:
            worker.log.write(news.output)
            if worker is self._speaker:
                self._show(news.output)

    def _settle_speaker(self) -> None:
        """Shows the output of the member with rank 0; while there is none, the last speaker stays."""
        slot = speaking_slot({slot: worker.row for slot, worker in self._workers.items()})
        if slot is not None:
            self._speaker = self._workers[slot]

    def _see_end(self, worker: RayWorker, status: ExitStatus, ended_s: float) -> None:
        if worker.report is not None:
            worker.log.write(worker.report.traceback.encode(errors="backslashreplace"))
        self._events.append(WorkerEvent(worker.slot, worker.id, worker.report, status, ended_s))
        del self._workers[worker.slot]
        self._past.append(worker)
        self._ask(worker.actor.end_and_join.remote(END_S), partial(self._clear_away, worker))

    def _lose(self, worker: RayWorker, error: BaseException) -> None:
        status = ExitStatus("SIGKILL", is_killed=True, reason=why_lost(error))
        self._events.append(WorkerEvent(worker.slot, worker.id, worker.report, status, time.monotonic()))
        del self._workers[worker.slot]
        kill_actors([worker.actor])

    def _clear_away(self, worker: RayWorker, future: "Future[WorkerNews | None]") -> None:
        """Writes the last output of a worker, and gives its resources back."""
        if worker in self._past:
            self._past.remove(worker)
            last = None if future.exception() is not None else future.result()
            if last is not None:
                self._take_news(worker, last)
            kill_actors([worker.actor])

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
            worker.actor.set_given_up.remote(slot, is_given_up)

    def state(self, slot: int) -> str:
        return self._workers[slot].state

    def activity(self, slot: int) -> Activity | None:
        return self._workers[slot].activity

    def ask_stack(self, slot: int) -> PendingStack:
        return PendingStack(self._workers[slot].actor.stack.remote(STACK_S).future())

    # -- ending workers ------------------------------------------------------------------------------------------

    def send(self, slot: int, signum: signal.Signals) -> None:
        if slot in self._workers:
            self._workers[slot].actor.send.remote(int(signum))

    def end(self, slot: int) -> None:
        self._cancel(slot)
        if slot in self._workers:
            self._workers[slot].actor.end.remote()

    def end_all(self) -> None:
        for slot in list(self._reserved):
            self._cancel(slot)
        workers, self._workers = list(self._workers.values()), {}
        self._end_now(workers)
        self._events = []

    def _cancel(self, slot: int) -> None:
        if slot in self._reserved:
            kill_actors([self._reserved.pop(slot).actor])

    def _end_now(self, workers: Collection[RayWorker]) -> None:
        """Kills the workers and waits until nothing of them, and of those that ended before, is left."""
        self._past += workers
        for worker in workers:
            self._ask(worker.actor.end_and_join.remote(END_S), partial(self._clear_away, worker))
        deadline_s = time.monotonic() + 2 * END_S
        while self._past and (left_s := deadline_s - time.monotonic()) > 0:
            self._turn(min(left_s, 1.0))
        kill_actors(worker.actor for worker in self._past)
        self._past = []


def pool_for(options: Mapping[str, Any]) -> OpenPool:
    """The pool for these options of the command line."""
    request = RayRequest(
        address=options.get("--address"),
        cpus=options.get("--cpus-per-worker", 1.0),
        gpus=options.get("--gpus-per-worker", 0.0),
        placement=options.get("--placement", "pack"),
    )
    return partial(RayPool, request=request)
