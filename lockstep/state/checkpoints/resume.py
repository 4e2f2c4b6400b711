"""All workers resume from one checkpoint: worker 0 chooses it, those that can read it do, the others receive it.

# Note [One chooses]
# Two workers that list a folder may see different things: other hosts, other moments, other damage. So worker 0 alone
# lists it, and sends the name and the manifest's digest. Another worker reads the checkpoint of that name in its own
# folder only if it has the same digest, which covers every bit. A worker without it receives the snapshot from worker 0
# over the wire. If worker 0 fails, it sends the reason, and all raise the same error.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import BadCheckpoint
from lockstep.settings.options import Settings
from lockstep.state.checkpoints.file import read_manifest, read_state
from lockstep.state.checkpoints.folder import newest_good, remove_leftovers
from lockstep.state.checkpoints.plan import AUTO, NEVER, CheckpointPlan
from lockstep.state.checkpoints.saver import AutomaticSaver, Checkpoints, SavingWorker
from lockstep.state.run_state import RunState, check, resume_notes
from lockstep.state.snapshot import Snapshot
from lockstep.state.transfer import receive_snapshot, send_snapshot
from lockstep.wire import Agreement, Proposal, Wire
from lockstep.wire.exchange import exchange_texts
from lockstep.wire.transport import SNAPSHOT, Transport

Say = Callable[[str], None]


def begin(
    plan: CheckpointPlan,
    parts: RunState,
    settings: Settings,
    wire: Wire,
    worker: SavingWorker,
    at_moment: Callable[[], None] = lambda: None,
    *,
    asked_for: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> AutomaticSaver:
    """Collective. Restores the chosen checkpoint, if there is one; returns what saves the run from now on.

    Nothing is changed unless the checkpoint is good and fits. A state that cannot be saved is refused now, not when
    the first checkpoint is due. `at_moment` and `asked_for` are those of `AutomaticSaver`.
    """
    Agreement(wire.transport, Proposal({"operation": "run.checkpoints", **plan.facts})).check()
    parts.capture()
    chosen = obtain(plan, wire.transport, worker.say, worker.claim)
    if chosen is not None:
        path, snapshot = chosen
        check(parts, snapshot, path, settings)
        notes = [f"going on from {path.name} in {path.parent}", *resume_notes(parts.models, snapshot, settings)]
        parts.install(snapshot)
        worker.goes_on(path)
        for note in notes:
            worker.say(note)
    checkpoints = Checkpoints(plan, worker, parts.steps.step, clock)
    return AutomaticSaver(checkpoints, parts, worker.say, at_moment, asked_for=asked_for)


@dataclass(frozen=True)
class Choice:
    """Worker 0's choice: a checkpoint, nothing (an empty path), or an error for all."""

    path: str = ""
    digest: str = ""
    error: str = ""


def obtain(
    plan: CheckpointPlan, transport: Transport, say: Say, claim: Callable[[], str] = str
) -> tuple[Path, Snapshot] | None:
    """Collective. The checkpoint to resume from, the same bits on all workers; None to start from the beginning.

    See Note [One chooses]. Costs two exchanges of short texts, and the snapshot's bytes for each worker that cannot
    read it.
    """
    mine = _choose(plan, say, claim) if transport.world.rank == 0 else Choice()
    choice = Choice(**json.loads(exchange_texts(transport, json.dumps(vars(mine)))[0]))
    if choice.error:
        raise BadCheckpoint(choice.error)
    if not choice.path:
        return None
    path = plan.folder / Path(choice.path).name if plan.resume == AUTO else Path(plan.resume)
    return path, _shared(_read(path, choice.digest), transport, choice, say)


def _choose(plan: CheckpointPlan, say: Say, claim: Callable[[], str]) -> Choice:
    try:
        if obstacle := claim():
            return Choice(error=obstacle)
        removed = remove_leftovers(plan.folder)
        if removed:
            say(f"{len(removed)} unfinished checkpoint(s) of killed saves removed from {plan.folder}")
        path = _newest(plan.folder, say) if plan.resume == AUTO else Path(plan.resume)
        if path is None or plan.resume == NEVER:
            return Choice()
        return Choice(str(path), read_manifest(path)["manifest_sha256"])
    except (OSError, BadCheckpoint) as error:
        return Choice(error=str(error))


def _newest(folder: Path, say: Say) -> Path | None:
    newest = newest_good(folder, read_state)
    for refused in newest.refused:
        say(f"refused, and left where it is: {refused.reason}")
    if newest.path is None:
        which = "good checkpoint in" if newest.refused else "checkpoint yet in"
        say(f"there is no {which} {folder}: the run starts from the beginning")
    return newest.path


def _read(path: Path, digest: str) -> Snapshot | str:
    """The snapshot; or why this worker does not have that checkpoint."""
    try:
        if read_manifest(path)["manifest_sha256"] != digest:
            return f"checkpoint {path} is another one than worker 0's"
        return read_state(path)
    except BadCheckpoint as error:
        return str(error)


def _shared(own: Snapshot | str, transport: Transport, choice: Choice, say: Say) -> Snapshot:
    """Collective. The snapshot, which worker 0 sends to workers without it."""
    obstacle = None if isinstance(own, Snapshot) else own
    obstacles = [json.loads(text) for text in exchange_texts(transport, json.dumps(obstacle))]
    if obstacles[0] is not None:
        raise BadCheckpoint(obstacles[0])
    if not isinstance(own, Snapshot):
        return receive_snapshot(transport, 0, SNAPSHOT)
    without = [rank for rank, reason in enumerate(obstacles) if reason is not None]
    if without and transport.world.rank == 0:
        workers, reason = ", ".join(map(str, without)), obstacles[without[0]]
        say(f"{Path(choice.path).name} is sent to workers that cannot read it: {workers} ({reason})")
        send_snapshot(transport, own, without, SNAPSHOT)
    return own


def restore(run: RunState, path: Path, settings: Settings, wire: Wire) -> list[str]:
    """Collective. Nothing is changed unless the whole checkpoint is good, fits, and is the same on all workers.

    Returns its `resume_notes`.
    """
    Agreement(wire.transport, Proposal({"operation": "run.resume", "path": path})).check()
    snapshot = read_state(path)
    state = snapshot.state
    Agreement(
        wire.transport,
        Proposal({"operation": "run.resume", "checkpoint": state["step"], "epoch": state["epoch"]}),
    ).check()
    check(run, snapshot, path, settings)
    notes = resume_notes(run.models, snapshot, settings)
    run.install(snapshot)
    return notes
