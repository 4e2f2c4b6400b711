"""`lockstep run --on ray` as a process, on a cluster of a test, and its workers' processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from launched import SCRIPT, Launched
from ray_clusters import REPOSITORY, RayCluster

SLOT = "LOCKSTEP_SLOT"
START_S = 240.0
"""Machines that run tests are slow, and a worker is three processes that each load Python."""


@contextmanager
def launched_on(
    cluster: RayCluster, folder: Path, *options: str, epochs: int = 60, pause_s: float = 0.3, script: str | None = None
) -> Iterator[Launched]:
    """A run of 4 steps an epoch, or of any script; afterwards nothing of it is left."""
    folder.mkdir(exist_ok=True)
    hurry, tests = str(folder / "hurry"), str(REPOSITORY / "tests")
    usual = SCRIPT.format(tests=tests, epochs=epochs, hurry=hurry, pause_s=pause_s, each_epoch="pass")
    (folder / "train.py").write_text(script or usual)
    words = ["run", "--on", "ray", "--address", cluster.address, "--run-dir", "run", *options, "train.py"]
    command = [*(cluster.inside[0] if cluster.inside else ()), sys.executable, "-m", "lockstep", *words]
    with followed(command, folder, cluster.variables) as run:
        yield run


@contextmanager
def followed(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> Iterator[Launched]:
    """The command as a process that stands in `folder`; afterwards it and its group are gone."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    run = Launched(folder, process)
    try:
        yield run
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        run.close()
        assert process.stdout is not None
        process.stdout.close()


def workers_of(folder: Path) -> dict[int, psutil.Process]:
    """The processes of the run in the folder that are workers now, by slot."""
    return dict(filter(None, (_worker(process, folder) for process in psutil.process_iter())))


def _worker(process: psutil.Process, folder: Path) -> tuple[int, psutil.Process] | None:
    with suppress(psutil.Error):
        if "lockstep.launch.worker" in process.cmdline() and process.cwd() == str(folder):
            return int(process.environ()[SLOT]), process
    return None
