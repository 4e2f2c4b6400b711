"""What all workers of a run must have alike, and how a worker that differs is refused."""

import hashlib
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lockstep.determinism.hardware import PROCESSOR, hardware, processor, variables
from lockstep.errors import Disagreement
from lockstep.run import active
from lockstep.settings.environment import LaunchPlace
from lockstep.settings.options import Settings
from lockstep.version import VERSION
from lockstep.wire import Agreement, Proposal, Wire
from lockstep.wire.agreement import Facts, first_difference

ONE_KIND = "Bits depend on it: take hosts of one kind, or start with exact=False, which does without the same bits."
WITNESS = "a roster that can be written"
"""All workers have one, or none has: see Note [Witness] in elastic/roster/roster.py."""


def terms(settings: Settings, has_witness: bool = False) -> dict[str, Any]:
    """What newcomers learn before they can ask to be admitted, and must have alike."""
    return {**_facts(settings, has_witness), "num_founders": settings.num_founders, "run": active.num_before()}


def agree(wire: Wire, settings: Settings, has_witness: bool) -> None:
    """Collective. Refuses workers that were started with different settings, with the first difference."""
    facts = _facts(settings, has_witness)
    Agreement(wire.transport, Proposal({"operation": "lockstep.start", **facts}, judge=_first_difference)).check()


def _first_difference(here: int, facts_of_all: Sequence[Facts]) -> Disagreement:
    return _advised(first_difference(here, facts_of_all))


def _advised(found: Disagreement) -> Disagreement:
    return replace(found, advice=ONE_KIND) if found.what == PROCESSOR else found


def leave_unless_same(run: int) -> None:
    """See Note [Several runs of one script] in active.py."""
    if run != active.num_before():
        print(
            f"  note: a worker cannot join: the others are in run {run + 1} of the script (lockstep.start() was called "
            "as often), and it is in another. They go on without it.",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(0)


def refuse_difference(theirs: dict[str, Any], mine: dict[str, Any], place: LaunchPlace) -> None:
    """Refuses a newcomer whose terms are others; a member of another version may not know all of them."""
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise _advised(Disagreement(name, place.world.rank, str(value), 0, str(theirs.get(name, "nothing"))))


def _facts(settings: Settings, has_witness: bool) -> dict[str, Any]:
    """What must be equal on all workers, now and later."""
    return {
        **settings.facts(),
        "version of lockstep": VERSION,
        "version of torch": torch.__version__,
        "version of Python": platform.python_version(),
        "digest of the script": _script_digest(),
        **hardware(settings.device),
        **(_kernels(settings.device) if settings.exact else {}),
        WITNESS: has_witness,
    }


def _kernels(device: torch.device) -> dict[str, str]:
    return {**processor(device), **variables(), "torch.backends.mkldnn.enabled": str(torch.backends.mkldnn.enabled)}


def _script_digest() -> str:
    """Of the script's own file; its imports are not looked at."""
    try:
        return hashlib.blake2b(Path(sys.argv[0]).read_bytes(), digest_size=8).hexdigest()
    except OSError:  # an interactive session, or a module
        return "unknown"
