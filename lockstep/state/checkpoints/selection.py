"""All workers go on from one checkpoint: worker 0 chooses, everyone who can reads it, the others are given it.

# Note [One chooses]
# Two workers that look into a folder may see different things: other hosts, other moments, other damage. So worker 0
# alone looks, and tells the name and the manifest's digest. Another worker reads the checkpoint of that name
# in its own folder only if it has the same digest, which covers every bit. Whoever has no such checkpoint is given the
# snapshot by worker 0 over the wire. If worker 0 cannot go on, it tells why, and all stop with the same words.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import BadCheckpoint
from lockstep.state.checkpoints.file import Snapshot, read_manifest
from lockstep.state.checkpoints.folder import newest_good, remove_leftovers
from lockstep.state.checkpoints.options import AUTO, NEVER, CheckpointPlan
from lockstep.state.schema import read_state
from lockstep.state.transfer import receive_snapshot, send_snapshot
from lockstep.wire.exchange import exchange_texts
from lockstep.wire.transport import SNAPSHOT, Transport

READ, MISSING = "read", "missing"


@dataclass(frozen=True)
class Choice:
    """What worker 0 found: a checkpoint, nothing (an empty name), or an error for all."""

    path: str = ""
    digest: str = ""
    error: str = ""


@dataclass(frozen=True)
class Obtained:
    """The checkpoint all workers go on from."""

    path: Path
    snapshot: Snapshot


def obtain(plan: CheckpointPlan, transport: Transport, say: Callable[[str], None]) -> Obtained | None:
    """Collective. The checkpoint to go on from, the same bits on all workers; None to start from the beginning.

    See Note [One chooses]. Costs two rounds of small talk, and the snapshot's bytes for each worker that cannot read.
    """
    mine = _choose(plan, say) if transport.world.rank == 0 else Choice()
    choice = Choice(**json.loads(exchange_texts(transport, json.dumps(vars(mine)))[0]))
    if choice.error:
        raise BadCheckpoint(choice.error)
    if not choice.path:
        return None
    path = _own_place(plan, choice)
    found = _read(path, choice)
    return Obtained(path, _handed(found, transport, choice, say))


def _choose(plan: CheckpointPlan, say: Callable[[str], None]) -> Choice:
    try:
        removed = remove_leftovers(plan.folder)
        if removed:
            say(f"{len(removed)} unfinished checkpoint(s) of killed saves removed from {plan.folder}")
        path = _chosen_path(plan, say)
        if path is None:
            return Choice()
        return Choice(str(path), read_manifest(path)["manifest_sha256"])
    except (OSError, BadCheckpoint) as error:
        return Choice(error=str(error))


def _chosen_path(plan: CheckpointPlan, say: Callable[[str], None]) -> Path | None:
    if plan.resume == NEVER:
        return None
    if plan.resume != AUTO:
        return Path(plan.resume)
    found = newest_good(plan.folder, read_state)
    for refused in found.refused:
        say(f"refused, and left where it is: {refused.reason}")
    if found.path is None:
        say(f"there is no good checkpoint in {plan.folder}: the run starts from the beginning")
    return found.path


def _own_place(plan: CheckpointPlan, choice: Choice) -> Path:
    return plan.folder / Path(choice.path).name if plan.resume == AUTO else Path(plan.resume)


def _read(path: Path, choice: Choice) -> Snapshot | str:
    """The snapshot; or why this worker has not that checkpoint."""
    try:
        if read_manifest(path)["manifest_sha256"] != choice.digest:
            return f"checkpoint {path} is another one than worker 0's"
        return read_state(path)
    except BadCheckpoint as error:
        return str(error)


def _handed(found: Snapshot | str, transport: Transport, choice: Choice, say: Callable[[str], None]) -> Snapshot:
    """Collective. The snapshot on every worker, if worker 0 has it."""
    words = exchange_texts(transport, json.dumps(_word(found)))
    told: list[dict[str, Any]] = [json.loads(text) for text in words]
    if told[0]["have"] != READ:
        raise BadCheckpoint(told[0]["why"])
    without = [rank for rank, word in enumerate(told) if word["have"] == MISSING]
    if without and isinstance(found, Snapshot) and transport.world.rank == 0:
        workers = ", ".join(map(str, without))
        say(f"{Path(choice.path).name} is sent to workers that cannot read it: {workers} ({told[without[0]]['why']})")
        send_snapshot(transport, found, without, SNAPSHOT)
    return found if isinstance(found, Snapshot) else receive_snapshot(transport, 0, SNAPSHOT)


def _word(found: Snapshot | str) -> dict[str, str]:
    return {"have": READ, "why": ""} if isinstance(found, Snapshot) else {"have": MISSING, "why": found}
