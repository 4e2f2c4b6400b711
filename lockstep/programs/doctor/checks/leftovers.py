"""What runs that have ended left behind."""

import shlex
from collections.abc import Iterable

from lockstep.programs.doctor.amounts import count, size
from lockstep.programs.doctor.facts import Facts
from lockstep.programs.doctor.finding import Finding, not_known, ok, warning

MOST_NAMED = 50


def orphans(facts: Facts) -> Finding:
    found = facts.leftovers.orphans
    if found is None:
        return not_known("orphans", "whether workers were left running")
    if not found:
        return ok("orphans", "no worker runs without its launcher")
    named = "; ".join(f"{orphan.pid} ({orphan.command})" for orphan in found[:3])
    more = f"; {len(found) - 3} more" if len(found) > 3 else ""
    return warning(
        "orphans",
        f"{count(len(found), 'process', 'processes')} of a run whose launcher is gone: {named}{more}",
        f"kill {' '.join(str(orphan.pid) for orphan in found[:MOST_NAMED])}",
    )


def dead_runs(facts: Facts) -> Finding:
    found = facts.leftovers.dead_runs
    if found is None:
        return not_known("ended runs", "which runs still go on")
    if not found:
        return ok("ended runs", "every run that says it goes on does")
    return warning(
        "ended runs",
        f"{count(len(found), 'run')} whose launcher was killed, or runs on another host: {', '.join(found)}",
        f"go on with `lockstep run --run-dir {shlex.quote(found[0])} --resume auto ...`, or "
        f"{_remove('rm', [f'{folder}/launcher.json' for folder in found])}",
    )


def partial_checkpoints(facts: Facts) -> Finding:
    found = facts.leftovers.partial_checkpoints
    if not found:
        return ok("checkpoints", "no half-written ones")
    return warning(
        "checkpoints",
        f"{count(len(found), 'half-written checkpoint')} of a writer that was killed (the one before is whole)",
        _remove("rm -r", found),
    )


def shared_files(facts: Facts) -> Finding:
    found = facts.leftovers.shared_files
    if found is None:
        return not_known("shared files", "what lies in /dev/shm")
    if not found:
        return ok("shared files", "no tensors of ended processes in /dev/shm")
    return warning(
        "shared files",
        f"{count(len(found), 'file')} of torch in /dev/shm, {size(facts.leftovers.shared_files_bytes)}, "
        "whose processes have ended",
        _remove("rm", found),
    )


def _remove(command: str, paths: Iterable[str]) -> str:
    return f"{command} {' '.join(shlex.quote(path) for path in list(paths)[:MOST_NAMED])}"
