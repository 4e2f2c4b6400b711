"""Actors of a Ray cluster as the launcher asks for them: places for workers, and answers. This module imports Ray."""

import queue
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from lockstep.errors import BadEnvironment
from lockstep.launch.host.signals import SCALE, LauncherSignals
from lockstep.launch.pools.ray_cluster import RayRequest, waiting_message, why_lost
from lockstep.launch.pools.ray_worker import ACTOR, ActorPlace

UNPLACED_S = 20.0
"""Workers that wait for a place in the cluster for so long are reported."""


class ActorAnswers:
    """Calls back when an actor has answered, in the thread that calls `wait`. Owns what wakes it."""

    def __init__(self, signals: LauncherSignals) -> None:
        self._answers: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(signals, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def ask(self, reference: Any, answered: Callable[["Future[Any]"], None]) -> None:
        """Calls `answered` when there is an answer or an error."""
        reference.future().add_done_callback(partial(self._hand_over, answered))

    def wait(self, within_s: float) -> None:
        """Takes the answers that are there, after the first one, a signal, or `within_s`."""
        self._selector.select(max(0.0, within_s))
        with suppress(BlockingIOError):
            self._woken.recv(1 << 16)
        with suppress(queue.Empty):
            while True:
                self._answers.get_nowait()()

    def close(self) -> None:
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _hand_over(self, answered: Callable[["Future[Any]"], None], future: "Future[Any]") -> None:
        """Called by a thread of Ray."""
        self._answers.put(partial(answered, future))
        with suppress(OSError):  # it is awake already, or closed
            self._wake.send(b".")


@dataclass(eq=False)
class Reservation:
    """An actor that has no worker yet. `place` is None until the cluster has found one; a founder has no slot yet."""

    slot: int | None
    actor: Any
    asked_s: float
    endpoints: tuple[str, ...] = ()
    place: ActorPlace | None = None
    error: BaseException | None = None
    is_reported: bool = False


class Reservations:
    """Owns the actors that wait for a place in the cluster; `placed` takes each that has one, or an error."""

    def __init__(
        self,
        answers: ActorAnswers,
        request: RayRequest,
        say: Callable[[str], None],
        placed: Callable[[Reservation], None],
    ) -> None:
        self._answers, self._request, self._say, self._placed = answers, request, say, placed
        self._waiting: list[Reservation] = []

    def add(self, slot: int | None = None, endpoints: tuple[str, ...] = ()) -> Reservation:
        actor = ACTOR.options(**self._request.options()).remote()
        reservation = Reservation(slot, actor, time.monotonic(), endpoints)
        self._waiting.append(reservation)
        self._answers.ask(actor.place.remote(), partial(self._answered, reservation))
        return reservation

    def await_founders(self, number: int, signals: LauncherSignals) -> list[tuple[Any, ActorPlace]]:
        """The actors of so many founders with their places; none if a signal ends the launch first."""
        founders = [self.add() for _ in range(number)]
        try:
            if self._all_placed(founders, signals):
                return [(founder.actor, founder.place) for founder in founders if founder.place is not None]
        except BaseException:
            self._cancel(founders)
            raise
        self._cancel(founders)
        return []

    def cancel(self, slot: int | None = None) -> None:
        """That of a joiner in the slot, or all."""
        self._cancel([one for one in self._waiting if slot in (None, one.slot)])

    def report_late(self) -> None:
        """Says once of each which has waited for long."""
        due_s = time.monotonic() - UNPLACED_S
        late = [one for one in self._waiting if not one.is_reported and one.asked_s <= due_s]
        if late:
            self._say(waiting_message(len(late), self._request, UNPLACED_S))
        for one in late:
            one.is_reported = True

    def _all_placed(self, founders: list[Reservation], signals: LauncherSignals) -> bool:
        seen: list[signal.Signals] = []
        while not all(founder.place for founder in founders) and all(signum == SCALE for signum in seen):
            self._answers.wait(1.0)
            self.report_late()
            for founder in founders:
                if founder.error is not None:
                    raise BadEnvironment(f"Ray cannot start a worker: {why_lost(founder.error)}") from founder.error
            seen += signals.take()
        for signum in seen:
            signals.add(signum)
        return all(founder.place for founder in founders)

    def _answered(self, reservation: Reservation, future: "Future[ActorPlace]") -> None:
        if reservation in self._waiting:  # else it was cancelled
            self._waiting.remove(reservation)
            reservation.error = future.exception()
            reservation.place = None if reservation.error is not None else future.result()
            if reservation.slot is not None:
                self._placed(reservation)

    def _cancel(self, reservations: Iterable[Reservation]) -> None:
        given_up = list(reservations)
        self._waiting = [one for one in self._waiting if one not in given_up]
        kill_actors(one.actor for one in given_up)


def kill_actors(actors: Iterable[Any]) -> None:
    for actor in actors:
        with suppress(RayError, ValueError):  # it is gone already
            ray.kill(actor, no_restart=True)
