"""Runs a training while workers die, join and leave, and compares it with the same training undisturbed.

`disturbed(...)` checks what must always hold: every scripted fault has fired; all who are left end with the digest, the
noise and the number of steps of one undisturbed worker; and every lane of every step that counts had the same samples.
"""

import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

from faults import Fault, Script
from ledger import Ledger, Used, Writer
from trainings import Training, Work
from workers import Outcome, fork, gather
from workers import _place as take_place

from lockstep.elastic import guard as continuity
from lockstep.events import Note
from lockstep.run.run import Run
from lockstep.settings.environments.lockstep_run import ENDPOINTS, MARK, PORT, RANK, SIZE, SLOT

LIMIT_S = 45.0


@dataclass(frozen=True)
class Arrival:
    """A worker that is started when `step` is about to begin; the others wait there until it is at the door."""

    step: int
    slot: int


@dataclass(frozen=True)
class Leaving:
    """A worker that is asked to leave, by SIGUSR1, when `step` is about to begin."""

    step: int
    worker: int


@dataclass(frozen=True)
class Plan:
    """All that disturbs a run. `extra` is called in each worker, with its number, before every step.

    Those who are `dying` are killed by something else than a fault, at the latest when they are done.
    """

    faults: tuple[Fault, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    leavings: tuple[Leaving, ...] = ()
    extra: Callable[[int, Work], None] | None = None
    dying: tuple[int, ...] = ()


@dataclass(frozen=True)
class Told:
    """What a run came to. Outcomes are by the workers' numbers: founders, then those who joined."""

    outcomes: list[Outcome]
    used: Used

    def values(self, key: str) -> list[Any]:
        """What those who are left say."""
        return [outcome.value[key] for outcome in self.outcomes if outcome.value is not None]


def disturbed(training: Training, num_workers: int, plan: Plan, *, others: Sequence[int] = ()) -> Told:
    """Trains on `num_workers` founders as `plan` has it; `others` end in a way that their test looks at itself."""
    result = observed(training, num_workers, plan)
    digest, steps, used = undisturbed(training)
    dead = {fault.worker for fault in plan.faults} | set(plan.dying)
    left = {leaving.worker for leaving in plan.leavings} - dead
    for number, outcome in enumerate(result.outcomes):
        if number in dead:
            assert outcome.killed_by == signal.SIGKILL, f"the fault of worker {number} never fired: {outcome}"
        elif number in left:
            assert (outcome.error, outcome.message) == ("SystemExit", "0"), f"worker {number} did not leave: {outcome}"
        elif number not in others:
            assert outcome.value is not None, f"worker {number}: {outcome}"
            assert (outcome.value["digest"], outcome.value["steps"]) == (digest, steps), f"worker {number}"
    assert result.used == used
    return result


@cache
def undisturbed(training: Training) -> tuple[str, int, Used]:
    """Digest, number of steps and samples of one worker that nothing happens to."""
    result = observed(training, 1, Plan())
    assert result.outcomes[0].value is not None, result.outcomes[0]
    return result.outcomes[0].value["digest"], result.outcomes[0].value["steps"], result.used


def observed(training: Training, num_workers: int, plan: Plan) -> Told:
    """What comes of it, whatever that is."""
    with tempfile.TemporaryDirectory() as folder, _invitations(plan) as invitations:
        ledger = Path(folder, "ledger")
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            places: list[Callable[[], None]] = [
                partial(_found, rank, num_workers, listener) for rank in range(num_workers)
            ]
            places += [partial(_join, invitation) for invitation in invitations.invitations]
            processes = [
                fork(place, LIMIT_S, _work, (number, training, plan, ledger, invitations), {})
                for number, place in enumerate(places)
            ]
        outcomes = gather(processes, LIMIT_S)
        return Told(outcomes, Ledger.read(ledger).used())


# -- in the workers ---------------------------------------------------------------------------------------------


def _work(number: int, training: Training, plan: Plan, ledger: Path, invitations: "Invitations") -> dict[str, Any]:
    continuity.LOOK_S = 0.0  # who is at the door is seen in the same step
    script = Script(plan.faults, number)
    result: dict[str, list[Any]] = {"sizes": [], "digests": [], "said": []}

    def between(run: Run) -> None:
        result["sizes"].append(run.size)
        result["digests"].append(run.digest())
        invitations.send(run)
        if any((leaving.step, leaving.worker) == (run.step, number) for leaving in plan.leavings):
            os.kill(os.getpid(), signal.SIGUSR1)
        if plan.extra is not None:
            plan.extra(number, work)

    run = training.start()
    run._events.subscribe(lambda event: result["said"].append(event.text) if isinstance(event, Note) else None)
    work = Work(training, run, script.reach, between)
    script.watch(run)
    Writer(ledger, int(os.environ[SLOT]), run)
    work.train()
    while number in plan.dying:
        signal.pause()
    return {"digest": f"{run.digest()} {run.noise}", "steps": run.step, "notes": work.notes, **result}


def _found(rank: int, num_workers: int, listener: socket.socket) -> None:
    take_place(rank, num_workers, listener)
    os.environ[SLOT] = str(rank)


def _join(invitation: "Invitation") -> None:
    slot = str(invitation.arrival.slot)
    endpoints = os.read(invitation.reader, 4096).decode()
    os.environ |= {MARK: "tests", RANK: slot, SIZE: str(int(slot) + 1), SLOT: slot, PORT: "1", ENDPOINTS: endpoints}


@dataclass(frozen=True)
class Invitation:
    """A pipe through which a worker that waits to be started is told where the members' endpoints are."""

    arrival: Arrival
    reader: int
    writer: int


@dataclass(frozen=True)
class Invitations:
    """Those of one run; every worker holds them, and the one at whose door all meet sends them."""

    invitations: list[Invitation] = field(default_factory=list)

    def send(self, run: Run) -> None:
        """Returns when all who are due at this step are at this worker's door."""
        due = [invitation for invitation in self.invitations if invitation.arrival.step == run.step]
        recovery = run.guard.recovery
        if not due or recovery is None or not recovery.is_coordinator:
            return
        members = recovery.membership.view.members
        endpoints = ",".join(member.address for member in members)
        awaited = [f"call/{recovery.endpoint._seen + number}" for number in range(len(due))]
        for invitation in due:
            os.write(invitation.writer, endpoints.encode())
        recovery.endpoint.store.wait(awaited, timedelta(seconds=LIMIT_S))


@contextmanager
def _invitations(plan: Plan) -> Iterator[Invitations]:
    invitations = Invitations([Invitation(arrival, *os.pipe()) for arrival in plan.arrivals])
    try:
        yield invitations
    finally:
        for invitation in invitations.invitations:
            os.close(invitation.reader)
            os.close(invitation.writer)
