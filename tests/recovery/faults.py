"""Faults scripted in logical time: a worker kills itself at one named point of one step.

The production code has no hooks for this: in the worker that is to die, the objects of the run are wrapped. The points
are `before NAME` and `after NAME` of

- what a step asks of its guard, and when it computes and waits: begins, computes, waits, prepares, commits, recovers,
  heals;
- what membership has performed: CloseWire, Probe, SendClaim, GatherClaims, SendDecision, Open, FindMembers;
- reduce, the reduction of a bucket, on the thread that does it;
- record exchange, commit exchange, hand_over; and `send in` and `receive in` each of these: a commit is sent by
  messages or, in shared memory, by semaphores;
- update, the optimizer's step (told by the script), and `in loader`, inside the data set (told by the data set);
- under a sharded strategy: meets and part, the two barriers of an update; batch, the update of a batch, and `in
  journal`, `in batch`, `before done` and `after done`, when its journal is written, when some of its elements are, when
  all are, and when that is marked;
  finish, what a survivor does for one that is lost; on GPUs store, when a worker's part goes to the memory of the host,
  gather, when the parameters come from the others, in each round, gradient, when its slice of a bucket goes there,
  hold, when the host gets the parameters, leave, when one leaves a worker's GPU, and fetch, when it comes back.
"""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from lockstep.events import Event, LaneBegan, Wait, WaitBegan
from lockstep.run.run import Run
from lockstep.strategies.sharded.engine import ShardedEngine
from lockstep.strategies.sharded.host_sums import HostSums
from lockstep.strategies.sharded.ledger import Ledger, Progress
from lockstep.strategies.sharded.offload import Offloadable, ParameterOffload
from lockstep.strategies.sharded.on_gpu import GpuOptimizer
from lockstep.strategies.sharded.on_host import HostOptimizer
from lockstep.strategies.sharded.optimizer import ShardedOptimizer
from lockstep.strategies.sharded.rounds import ParameterRounds
from lockstep.wire.shared import semaphores

GUARD = {"begin": "begins", "prepared": "prepares", "committed": "commits", "recover": "recovers", "heal": "heals"}
EXCHANGES = {"_exchange_records": "record exchange", "commit": "commit exchange"}


@dataclass(frozen=True)
class Fault:
    """Worker number `worker` dies when it reaches `point` for the `nth` time in `step` (None: in any step).

    Workers are numbered as they are started: founders first, then those who join.
    """

    worker: int
    step: int | None
    point: str
    nth: int = 1

    def __str__(self) -> str:
        return f"worker {self.worker}, step {self.step}, {self.point}" + (f" ({self.nth})" if self.nth > 1 else "")


class Script:
    """The faults of one worker. What is never reached never fires, and the worker's test sees that it lives."""

    def __init__(self, faults: Iterable[Fault], worker: int) -> None:
        self._faults = [fault for fault in faults if fault.worker == worker]
        self._reached: Counter[Fault] = Counter()
        self._inside: list[str] = []
        self._run: Run | None = None
        self._reducing = False
        self._moving = False

    def reach(self, point: str, step: int | None = None) -> None:
        """Dies here if that is written."""
        if self._run is not None and step is None:
            step = self._run._loop.step
        for fault in self._faults:
            if fault.point == point and fault.step in (None, step):
                self._reached[fault] += 1
                if self._reached[fault] == fault.nth:
                    os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, run: Run) -> None:
        """Wraps the run, whose model must have been replicated."""
        self._run = run
        for name, point in GUARD.items():
            self._around(run.guard, name, point)
        for name, point in EXCHANGES.items():
            self._around(run._engine, name, point)
        if run.guard.recovery is not None:
            self._around(run.guard.formation, "hand_state_over", "hand_over")
            self._watch_actions(run.guard.recovery)
        self._watch_wire(run.guard.generation.wire)
        self._watch_generations(run)
        run._events.subscribe(self._on_event, LaneBegan, WaitBegan)
        if isinstance(run._engine, ShardedEngine):
            self._watch_updates()
        semaphores.post = self._told_in_commit(semaphores.post)

    def _watch_updates(self) -> None:
        """Of all objects that this worker will make."""
        for owner, name, point in (
            (ShardedEngine, "_meet", "meets"),
            (ShardedEngine, "after_update", "part"),
            (HostOptimizer, "finish_all", "finish"),
            (HostOptimizer, "_begin", "batch begins"),
            (HostOptimizer, "_end", "batch ends"),
            (GpuOptimizer, "finish_all", "finish"),
            (GpuOptimizer, "_store", "store"),
            (GpuOptimizer, "_gather", "gather"),
            (ParameterRounds, "_gather", "round"),
            (HostSums, "_store", "gradient"),
            (ParameterOffload, "hold", "hold"),
            (Offloadable, "leave", "leave"),
            (Offloadable, "fetch", "fetch"),
        ):
            self._around(owner, name, point)
        mark, restore = Ledger.mark, ShardedOptimizer._restore_groups

        def in_journal(ledger: Ledger, batch: int, number: int, progress: Progress) -> None:
            self.reach("in journal" if progress is Progress.BEGUN else "before done")
            mark(ledger, batch, number, progress)
            if progress is Progress.DONE:
                self.reach("after done")

        def in_batch(sharded: ShardedOptimizer) -> None:
            self.reach("in batch")
            restore(sharded)

        Ledger.mark, ShardedOptimizer._restore_groups = in_journal, in_batch  # type: ignore[method-assign]

    def _around(self, owner: Any, name: str, point: str) -> None:
        inner = getattr(owner, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            with self._within(point):
                result = inner(*args, **options)
            self.reach(f"after {point}")
            return result

        setattr(owner, name, wrapped)

    @contextmanager
    def _within(self, point: str) -> Iterator[None]:
        self.reach(f"before {point}")
        self._inside.append(point)
        try:
            yield
        finally:
            self._inside.pop()

    def _watch_actions(self, recovery: Any) -> None:
        perform = recovery._perform

        def wrapped(action: Any) -> Any:
            name = type(action).__name__
            self.reach(f"before {name}")
            events = perform(action)
            self.reach(f"after {name}")
            return events

        recovery._perform = wrapped

    def _watch_wire(self, wire: Any) -> None:
        self._around_reduce(wire.reducer)
        for name in ("send", "receive"):
            setattr(wire.transport, name, self._told(getattr(wire.transport, name), name))

    def _watch_generations(self, run: Any) -> None:
        hand_over = run.guard.formation.hand_state_over

        def wrapped(decision: Any, wire: Any) -> None:
            self._watch_wire(wire)
            hand_over(decision, wire)

        run.guard.formation.hand_state_over = wrapped

    def _on_event(self, event: Event) -> None:
        match event:
            case LaneBegan(trains=True):
                self.reach("before computes")
                self.reach("after computes")
            case WaitBegan(Wait.STEP, num_buckets=0):
                self.reach("before waits")
                self.reach("after waits")

    def _around_reduce(self, reducer: Any) -> None:
        """Some reducers do the one by the other: that is one reduction."""
        for name in ("reduce", "reduce_unclosed", "reduce_once"):
            if hasattr(reducer, name):
                setattr(reducer, name, self._told_once(getattr(reducer, name)))

    def _told_once(self, reduce: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*args: Any, **options: Any) -> None:
            if self._reducing:
                return reduce(*args, **options)
            self.reach("before reduce")
            self._reducing = True
            reduce(*args, **options)
            self._reducing = False
            return self.reach("after reduce")

        return wrapped

    def _told(self, move: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Messages of the thread that makes the steps; those of a reduction belong to no named exchange."""

        def wrapped(*args: Any, **options: Any) -> Any:
            inside = self._exchange
            self.reach(f"before {name} in {inside}")
            self._moving = bool(inside)
            pending = move(*args, **options)
            self._moving = False
            self.reach(f"after {name} in {inside}")
            return pending

        return wrapped

    def _told_in_commit(self, post: Callable[[int], None]) -> Callable[[int], None]:
        """A message is told by itself, whatever it is sent by."""

        def wrapped(address: int) -> None:
            if self._exchange != "commit exchange" or self._moving:
                return post(address)
            self.reach("before send in commit exchange")
            post(address)
            return self.reach("after send in commit exchange")

        return wrapped

    @property
    def _exchange(self) -> str:
        return self._inside[-1] if self._inside and threading.current_thread() is threading.main_thread() else ""


def sampled(cases: Sequence[Any], every: int, skip: int = 0) -> list[Any]:
    """One of so many cases stays in the short version, the next one each time with `skip`; the others are soak."""
    kept = {place + (place // every * skip) % every for place in range(0, len(cases), every)}
    return [case if place in kept else _soak(case) for place, case in enumerate(cases)]


def _soak(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.soak)
