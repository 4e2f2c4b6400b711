"""Whole runs that are disturbed at any moment leave nothing: no process, socket, shared memory or temporary file."""

import os
import random
import select
import signal
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import psutil
import pytest
from launched import REPOSITORY, Launched, launched_script, send

TOKEN = "TOKEN_OF_THIS_RUN"
WITHIN_S = 3.0
LEFT_S = 20.0

SCRIPT = """
import os, select, sys
sys.path.insert(0, {tests!r})
import lockstep
from training import Job, loader_of, make, train_step

run = lockstep.start(lanes=6, seed=3)
job = Job(augment=True, num_workers={num_loaders})
model, optimizer = make(job)
run.replicate(model, optimizer)
loader = run.shard(loader_of(job))
for epoch in run.epochs(25):
    for batch in loader:
        train_step(run, job, model, optimizer, batch)
        if os.path.exists({control!r} + "/raise"):
            raise ValueError("as the test wants it")
        if not os.path.exists({control!r} + "/hurry"):
            select.select([], [], [], 0.05)
        run.print("step", run.step, flush=True)
"""


@dataclass(frozen=True)
class Disturbed:
    """A run under way that is about to be disturbed. `control` is where the script looks for what it shall do."""

    run: Launched
    control: Path
    chance: random.Random

    def worker(self) -> int:
        members = self.run.members()
        return members[self.chance.choice(sorted(members))]

    def end(self) -> int:
        """Lets the run come to its end; its exit code."""
        (self.control / "hurry").touch()
        return self.run.process.wait(120)


# -- what disturbs it; each gives the exit codes that may come of it ------------------------------------------


def _kill_a_worker(run: Disturbed) -> set[int]:
    send(run.worker())
    return {0}


def _kill_all_workers(run: Disturbed) -> set[int]:
    for pid in run.run.members().values():
        send(pid)
    return {0}


def _kill_the_launcher(run: Disturbed) -> set[int]:
    run.run.process.kill()
    return {-signal.SIGKILL}


def _kill_a_loader(run: Disturbed) -> set[int]:
    """The script that has lost its loader raises, unless the loader was through with its work."""
    loaders = psutil.Process(run.worker()).children()
    if loaders:
        run.chance.choice(loaders).kill()
    return {0, 1}


def _interrupt(run: Disturbed) -> set[int]:
    run.run.process.send_signal(signal.SIGINT)
    return {130}


def _interrupt_twice(run: Disturbed) -> set[int]:
    run.run.process.send_signal(signal.SIGINT)
    _pass(run.chance.random() * 0.3)
    run.run.process.send_signal(signal.SIGINT)
    return {130}


def _terminate(run: Disturbed) -> set[int]:
    run.run.process.send_signal(signal.SIGTERM)
    return {143}


def _raise_in_the_script(run: Disturbed) -> set[int]:
    (run.control / "raise").touch()
    return {1}


DISTURBANCES: dict[str, Callable[[Disturbed], set[int]]] = {
    "a worker is killed": _kill_a_worker,
    "Ctrl-C": _interrupt,
    "the launcher is killed": _kill_the_launcher,
    "a loader process is killed": _kill_a_loader,
    "the script raises": _raise_in_the_script,
    "all workers are killed": _kill_all_workers,
    "Ctrl-C twice": _interrupt_twice,
    "SIGTERM": _terminate,
}
BEFORE_ALL_ARE_THERE = ("Ctrl-C", "Ctrl-C twice", "SIGTERM", "the launcher is killed")
"""These may also come while the run is being started."""


def _pass(seconds: float) -> None:
    """A moment that nobody chose: chance is all that it stands for."""
    select.select([], [], [], seconds)


# -- what is left ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traces:
    """What there is of one run. `folder` is where the command was given, `private` is for its temporary files."""

    token: str
    folder: Path
    private: Path
    shared_memory: frozenset[str]

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_of_the_run(process.pid)]

    def _is_of_the_run(self, pid: int) -> bool:
        try:
            texts = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline")]
        except OSError:  # it has ended, or is another user's
            return False
        return any(self.token.encode() in text for text in texts)

    def sockets(self) -> set[tuple[object, ...]]:
        return {socket for process in self.processes() for socket in _sockets_of(process)}

    def left(self, sockets: set[tuple[object, ...]]) -> dict[str, object]:
        """By kind, after LEFT_S, or as soon as there is nothing; `sockets` are those that the run had."""
        until_s = time.monotonic() + LEFT_S
        while (found := self._found(sockets)) and time.monotonic() < until_s:
            _pass(0.05)
        return found

    def _found(self, sockets: set[tuple[object, ...]]) -> dict[str, object]:
        found: dict[str, object] = {
            "processes": self.processes(),
            "sockets": sockets & {_socket(entry) for entry in psutil.net_connections("tcp")},
            "shared memory": _unused(_shared_memory() - self.shared_memory),
            "temporary files": self._temporary_files(),
            "files": sorted(set(os.listdir(self.folder)) - {"runs", "train.py"}),
        }
        return {kind: things for kind, things in found.items() if things}

    def _temporary_files(self) -> list[str]:
        """But for the folders in which Python's multiprocessing keeps a socket: a loader process that is killed, as
        any DataLoader's is with its worker, has nobody to remove its own.
        """
        return [str(path) for path in self.private.iterdir() if not path.name.startswith("pymp-")]


def _sockets_of(process: psutil.Process) -> list[tuple[object, ...]]:
    try:
        return [_socket(entry) for entry in process.net_connections("tcp")]
    except psutil.Error:
        return []


def _socket(entry: "psutil._common.sconn | psutil._common.pconn") -> tuple[object, ...]:
    """An end of a connection, or a listener; one that only waits for late packets is the kernel's own."""
    return (entry.laddr, entry.raddr) if entry.status in (psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED) else ()


def _shared_memory() -> frozenset[str]:
    return frozenset(os.listdir("/dev/shm"))


def _unused(names: frozenset[str]) -> set[str]:
    """Those that no process has mapped: what somebody uses is not left behind by a run that has ended."""
    left = set(names)
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        try:
            text = maps.read_text()
        except OSError:
            continue
        left -= {name for name in left if f"/dev/shm/{name}" in text}
    return left


# -- one run --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One disturbed run, all of it chosen by the seed; `name` is the disturbance."""

    seed: int
    name: str
    num_workers: int

    def __str__(self) -> str:
        return f"{self.name} (seed {self.seed})"


def _take(case: Case, base: Path) -> float | None:
    """Takes a run through its case; afterwards nothing of it is left. Gives how long Ctrl-C took, where it came."""
    chance, folder, control = random.Random(case.seed), base / f"{case.seed}", base / f"{case.seed}-control"
    folder.mkdir()
    control.mkdir()
    with TemporaryDirectory(prefix="t") as private:  # a short name: loader processes make sockets in it
        traces = Traces(f"lockstep-{uuid4().hex}", folder, Path(private), _shared_memory())
        # torch makes the folder of its compiler's cache, which is to last, when an optimizer is made.
        variables = {TOKEN: traces.token, "TMPDIR": private, "TORCHINDUCTOR_CACHE_DIR": str(control / "cache")}
        with launched_script(folder, _script(case, chance, control), *_options(case, chance), **variables) as run:
            return _disturb(case, Disturbed(run, control, chance), traces)


def _disturb(case: Case, disturbed: Disturbed, traces: Traces) -> float | None:
    _await_the_moment(case, disturbed)
    assert traces.processes(), "what is left could not be found either"
    sockets = traces.sockets() - {()}
    began_s = time.monotonic()
    codes = DISTURBANCES[case.name](disturbed)
    code = disturbed.end()
    took_s = time.monotonic() - began_s
    left = traces.left(sockets)
    assert not left, f"{case}: {left}\n{disturbed.run.shown()}"
    assert code in codes, f"{case}: exit code {code}\n{disturbed.run.shown()}"
    return took_s if case.name == "Ctrl-C" else None


def _script(case: Case, chance: random.Random, control: Path) -> str:
    has_loader = case.name == "a loader process is killed" or chance.random() < 0.3
    return SCRIPT.format(tests=str(REPOSITORY / "tests"), num_loaders=int(has_loader), control=str(control))


def _options(case: Case, chance: random.Random) -> list[str]:
    spares = ["--spares", "1"] if chance.random() < 0.5 else []
    saves = ["--checkpoint-every", "3 steps"] if chance.random() < 0.5 else []
    return ["-n", str(case.num_workers), *spares, *saves]


def _await_the_moment(case: Case, disturbed: Disturbed) -> None:
    """While it starts, or after some step."""
    chance = disturbed.chance
    if case.name in BEFORE_ALL_ARE_THERE and chance.random() < 0.3:
        _pass(chance.random() * 5.0)
    else:
        disturbed.run.wait_for(rf"^step {chance.randrange(1, 12)}$", within_s=90)
        _pass(chance.random() * 0.2)


def _take_all(cases: list[Case], base: Path) -> list[float]:
    """As many at once as the machine has cores for; how long each Ctrl-C took."""
    at_once = max(1, (os.cpu_count() or 1) // 3)
    with ThreadPoolExecutor(at_once) as executor:
        took_s = list(executor.map(lambda case: _take(case, base), cases))
    return [seconds for seconds in took_s if seconds is not None]


@pytest.mark.parametrize("name", list(DISTURBANCES)[:6:2])
def test_a_run_that_is_disturbed_leaves_nothing(tmp_path: Path, name: str) -> None:
    _take(Case(list(DISTURBANCES).index(name), name, num_workers=2), tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_runs_that_are_disturbed_leave_nothing_and_end_soon_after_ctrl_c(tmp_path: Path) -> None:
    names = [name for _ in range(13) for name in DISTURBANCES][:100]
    took_s = _take_all([Case(100 + number, name, num_workers=3) for number, name in enumerate(names)], tmp_path)
    assert statistics.median(took_s) <= WITHIN_S
