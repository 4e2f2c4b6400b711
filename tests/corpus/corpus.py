"""Scripts as strangers write them, run calm and disturbed: what each comes to must be the bits of the calm run, or a
sentence."""

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from launches import launch
from workers import Outcome, outcomes

HERE = Path(__file__).parent
SHAPES = sorted(path.stem for path in (HERE / "shapes").glob("*.py"))
STOPPED = 143
"""The exit code of `lockstep run` when it was told to stop."""
KINDS = ("calm", "lost", "replaced", "joined", "scaled", "resumed")
COLLECTING = [shape for shape in SHAPES if "run.total(" in (HERE / "shapes" / f"{shape}.py").read_text()]
"""Those that evaluate in lanes."""

_PRELUDE = f"import sys; sys.path[:0] = [{str(HERE)!r}]; import corpus_prelude\n"
_ERRORS = r"(?:Disagreement|Misuse|BadCheckpoint|BadArgument|CannotCut): "
_REFUSAL = re.compile(
    rf"^(?:✗ worker \d+ failed.*?: ({_ERRORS}.*)|  (?:note: )?(worker \d is rank 0 from now on: .*))$", re.MULTILINE
)
_LEFT = re.compile(r"^! worker \d+ gives its place up: (this worker (?:cannot join|leaves) at step .*)$", re.MULTILINE)


OPTIONS = {
    "joined": ("--no-copies",),
    "crashed": ("--checkpoint-every", "3 steps"),
    "again": ("--resume", "auto"),
}
"""Of `lockstep run`, by the kind of fault."""


@dataclass(frozen=True)
class Fault:
    """What happens to a run, by its kind.

    calm: nothing. lost: workers are killed, and nobody takes their places. replaced: copies of living workers do.
    joined: newcomers do, which run the script from the top. scaled: the number of workers changes twice. resumed: the
    run is stopped, and goes on with `then` workers. crashed: the same, and the run is killed, launcher and all; it is
    saved every third step. again: it goes on in a folder in which it was stopped. collecting: workers are killed where
    they collect what lanes have given, and all start again.
    """

    kind: str
    workers: int = 3
    kills: tuple[tuple[int, int], ...] = ()
    """Slots and steps."""
    collects: tuple[tuple[int, int], ...] = ()
    """Slots, and the steps from which on."""
    scale: tuple[tuple[int, int], ...] = ()
    """Steps and numbers of workers."""
    stop: int = -1
    crash: int = -1
    then: int = 0

    def plan(self) -> dict[str, Any]:
        """As the prelude reads it."""
        plan = {"workers": self.workers, "kills": self.kills, "collects": self.collects}
        plan |= {"scale": self.scale, "stop": self.stop, "crash": self.crash}
        return plan | {"awaits_newcomer": self.kind == "joined"}

    def happened(self, folder: Path) -> bool:
        """Whether all of it has."""
        marks = [f"kill {list(kill)}" for kill in self.kills] + [f"scale {list(change)}" for change in self.scale]
        marks += [f"collect {list(kill)}" for kill in self.collects]
        marks += ["stop"] if self.stop >= 0 else []
        marks += ["crash"] if self.crash >= 0 else []
        return all((folder / f"done {mark}").exists() for mark in marks)


USUAL = {
    "calm": Fault("calm"),
    "lost": Fault("lost", kills=((1, 7),)),
    "replaced": Fault("replaced", kills=((1, 7),)),
    "joined": Fault("joined", workers=2, kills=((1, 7),)),
    "scaled": Fault("scaled", workers=2, scale=((4, 3), (11, 2))),
    "resumed": Fault("resumed", workers=2, stop=8, then=3),
}
"""One fault of each kind."""
WHILE_COLLECTING = Fault("collecting", collects=((0, 8), (1, 12)))


@dataclass(frozen=True)
class Result:
    """What a run came to: the digests of all who came to the end, what the script has shown, and what was refused."""

    exit_code: int
    digests: frozenset[str]
    extra: tuple[str, ...]
    refusals: tuple[str, ...]
    left: tuple[str, ...]
    """What newcomers said who went away."""
    shown: str


@cache
def calm(shape: str) -> Result:
    """The script on one worker that nothing happens to."""
    with TemporaryDirectory() as folder:
        return _by_hand(Path(folder), shape, Fault("calm", workers=1))


def disturbed(folder: Path, shape: str, fault: Fault) -> Result:
    """The script with a fault."""
    if fault.kind == "lost":
        return _by_hand(folder, shape, fault)
    options = OPTIONS.get(fault.kind, ())
    result = _launched(folder, shape, fault.workers, options, fault)
    if fault.kind == "collecting":  # a copy that was made while all ended is left out, and ends where it was made
        last = max((_step_of(digest) for digest in result.digests), default=0)
        return replace(result, digests=frozenset(one for one in result.digests if _step_of(one) == last))
    if fault.then and (fault.kind, result.exit_code) in (("resumed", STOPPED), ("crashed", -signal.SIGKILL)):
        later = _launched(folder, shape, fault.then, ("--resume", "auto"), Fault("calm"))
        return replace(later, extra=result.extra + later.extra, shown=f"{result.shown}\n{later.shown}")
    return result


def _step_of(digest: str) -> int:
    return int(digest.split()[1])


def verdict(shape: str, result: Result) -> str:
    """What a disturbed run came to, compared with the calm one; fails where something is wrong in silence."""
    if result.exit_code and result.refusals:
        return "refused"
    outcome = f"{shape} ended with {result.exit_code}:\n{result.shown}"
    assert result.exit_code == 0, outcome
    assert result.digests == calm(shape).digests, f"{shape} has other bits than undisturbed:\n{result.shown}"
    assert set(result.extra) == set(calm(shape).extra), f"{shape} shows something else:\n{result.shown}"
    return "same, newcomer left" if result.left else "same"


def _by_hand(folder: Path, shape: str, fault: Fault) -> Result:
    """Workers without a launcher: nobody replaces them."""
    found = outcomes(fault.workers, _work, _script(shape), str(folder), json.dumps(fault.plan()))
    shown = [path.read_text() for path in sorted(folder.glob("shown-*"))]
    errors = [f"✗ worker {rank} failed: {one.error}: {one.message}" for rank, one in enumerate(found) if one.error]
    return _read(folder, _exit_code(found, fault), "\n".join(shown + errors))


def _exit_code(found: Sequence[Outcome], fault: Fault) -> int:
    killed = {slot for slot, _ in fault.kills}
    return int(any(one.error or (one.killed_by and rank not in killed) for rank, one in enumerate(found)))


def _work(script: str, folder: str, plan: str) -> None:
    os.chdir(folder)
    os.environ["CORPUS"] = plan
    sys.stdout = sys.stderr = open(f"shown-{os.getpid()}", "w", buffering=1)  # noqa: SIM115
    exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})


def _launched(folder: Path, shape: str, workers: int, options: Sequence[str], fault: Fault) -> Result:
    with launch(folder, _script(shape), "-n", str(workers), *options, CORPUS=json.dumps(fault.plan())) as run:
        exit_code = run.finish()
    return _read(folder, exit_code, run.shown())


def _script(shape: str) -> str:
    """Of a shape by its name, or a script that was composed."""
    return _PRELUDE + (shape if "\n" in shape else (HERE / "shapes" / f"{shape}.py").read_text())


def _read(folder: Path, exit_code: int, shown: str) -> Result:
    digests = frozenset(path.read_text() for path in folder.glob("digest-*"))
    extra = tuple(line for line in shown.splitlines() if line.startswith("extra"))
    refusals = tuple("".join(found) for found in _REFUSAL.findall(shown))
    return Result(exit_code, digests, extra, refusals, tuple(_LEFT.findall(shown)), shown)
