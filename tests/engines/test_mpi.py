"""lockstep under real MPI launchers on one host: Open MPI's mpirun, and MPICH's Hydra."""

import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from engine_runs import SCRIPT, assert_resumed, await_file, digest_in
from machines import engine, worker_environment

LIMIT_S = 300.0
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpirun(name: str, folder: Path, *options: str, environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """The exit code and the output of `mpirun`; what comes after `--` among the options is the script's.

    Where the script waits for the test, mpirun is told to end there.
    """
    launcher = engine(name) / "bin/mpirun"
    before, after = options, ()
    if "--" in options:
        cut = options.index("--")
        before, after = options[:cut], options[cut + 1 :]
    command = [str(launcher), *before, sys.executable, str(SCRIPT), str(folder), *after]
    with subprocess.Popen(
        command,
        env=worker_environment({**AS_ROOT, **(environ or {})}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            if "--wait-at" in after:
                await_file(folder / "reached")
                process.terminate()
                (folder / "go").touch()
            output, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    return process.returncode, output


RECOVERABLE = ("--runtime-options", "recoverable")


def open_mpi(folder: Path, *options: str) -> tuple[int, str]:
    return mpirun("openmpi", folder, "--oversubscribe", *options)


def mpich(folder: Path, *options: str) -> tuple[int, str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return mpirun("mpich", folder, *options, environ={"MASTER_PORT": str(port)})


def test_three_workers_of_open_mpi_come_to_the_bits_of_one_worker(tmp_path: Path, calm: str) -> None:
    code, output = open_mpi(tmp_path, "-n", "3")
    assert (code, digest_in(output)) == (0, calm), output
    assert "3 workers" in output


def test_open_mpi_ends_all_when_one_is_killed_and_the_next_start_resumes(tmp_path: Path, calm: str) -> None:
    code, output = open_mpi(tmp_path, "-n", "3", "--", "--kill", "1:12")
    assert code == 137, output
    assert "digest" not in output
    assert_resumed(open_mpi(tmp_path, "-n", "2"), calm)


def test_with_recoverable_those_who_are_left_come_to_the_same_bits(tmp_path: Path, calm: str) -> None:
    code, output = open_mpi(tmp_path, "-n", "3", "--runtime-options", "recoverable", "--", "--kill", "1:12")
    assert (code, digest_in(output)) == (0, calm), output
    assert "worker 1 is lost" in output


@pytest.mark.parametrize("options", [(), RECOVERABLE], ids=["default", "recoverable"])
def test_when_all_workers_of_open_mpi_are_killed_the_next_start_resumes(
    options: tuple[str, ...], tmp_path: Path, calm: str
) -> None:
    _, output = open_mpi(tmp_path, "-n", "3", *options, "--", "--kill", "all:12")
    assert "digest" not in output
    assert_resumed(open_mpi(tmp_path, "-n", "2", *options), calm, "10")


@pytest.mark.parametrize("options", [(), RECOVERABLE], ids=["default", "recoverable"])
def test_when_mpirun_of_open_mpi_is_told_to_end_the_next_start_resumes(
    options: tuple[str, ...], tmp_path: Path, calm: str
) -> None:
    """It does not wait for its workers for long: whether they save depends on the length of a step."""
    code, output = open_mpi(tmp_path, "-n", "2", *options, "--", "--wait-at", "12")
    assert code != 0, output
    assert_resumed(open_mpi(tmp_path, "-n", "3", *options), calm)


def test_three_workers_with_recoverable_come_to_the_bits_of_one_worker(tmp_path: Path, calm: str) -> None:
    code, output = open_mpi(tmp_path, "-n", "3", *RECOVERABLE)
    assert (code, digest_in(output)) == (0, calm), output


def test_two_workers_of_mpich_come_to_the_bits_of_one_worker(tmp_path: Path, calm: str) -> None:
    code, output = mpich(tmp_path, "-n", "2")
    assert (code, digest_in(output)) == (0, calm), output


@pytest.mark.parametrize("killed", ["1", "all"])
def test_mpich_ends_all_when_workers_are_killed_and_the_next_start_resumes(
    killed: str, tmp_path: Path, calm: str
) -> None:
    code, output = mpich(tmp_path, "-n", "2", "--", "--kill", f"{killed}:12")
    assert code != 0
    assert "digest" not in output
    assert_resumed(mpich(tmp_path, "-n", "3"), calm)


def test_when_mpirun_of_mpich_is_told_to_end_the_next_start_resumes(tmp_path: Path, calm: str) -> None:
    code, output = mpich(tmp_path, "-n", "2", "--", "--wait-at", "12")
    assert code != 0, output
    assert_resumed(mpich(tmp_path, "-n", "2"), calm)


def test_mpich_without_a_port_is_told_to_set_one(tmp_path: Path) -> None:
    code, output = mpirun("mpich", tmp_path, "-n", "2")
    assert code != 0
    assert "set MASTER_PORT to a free port" in output
