"""lockstep under torchrun: on one host, and two agents on two machines."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from engine_runs import SCRIPT, assert_resumed, await_file, digest_in
from machines import INTERFACE, Machine, machines, worker_environment

LIMIT_S = 250.0
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.2")


def popen(*command: str, environ: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        env=worker_environment(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def torchrun(folder: Path, *options: str, kill: str = "none:0") -> tuple[int, str]:
    with popen(*TORCHRUN, "--standalone", *options, str(SCRIPT), str(folder), "--kill", kill) as agent:
        try:
            output, _ = agent.communicate(timeout=LIMIT_S)
        finally:
            agent.kill()
    return agent.returncode, output


def test_three_workers_of_torchrun_come_to_the_bits_of_one_worker(tmp_path: Path, calm: str) -> None:
    code, output = torchrun(tmp_path, "--nproc-per-node", "3")
    assert (code, digest_in(output)) == (0, calm), output


def test_when_a_worker_is_killed_torchrun_restarts_all_and_the_run_resumes(tmp_path: Path, calm: str) -> None:
    code, output = torchrun(tmp_path, "--nproc-per-node", "2", "--max-restarts", "2", kill="1:12")
    assert (code, digest_in(output)) == (0, calm), output
    assert "begins at step 10" in output


def test_without_restarts_the_next_start_resumes(tmp_path: Path, calm: str) -> None:
    code, output = torchrun(tmp_path, "--nproc-per-node", "2", kill="all:12")
    assert code == 1
    assert "digest" not in output
    assert_resumed(torchrun(tmp_path, "--nproc-per-node", "3"), calm, "10")


def test_an_agent_that_is_told_to_end_has_its_workers_save(tmp_path: Path, calm: str) -> None:
    words = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(SCRIPT), str(tmp_path), "--wait-at", "12")
    with popen(*words) as agent:
        try:
            await_file(tmp_path / "reached")
            agent.terminate()
            (tmp_path / "go").touch()
            output, _ = agent.communicate(timeout=LIMIT_S)
        finally:
            agent.kill()
    assert agent.returncode != 0
    assert "SIGTERM has come: the run is saved and ends after the step" in output
    assert_resumed(torchrun(tmp_path, "--nproc-per-node", "3"), calm, "13", "14")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Machine]]:
    with machines(["a", "b"], tmp_path) as (found, _):
        yield found


Agents = list["subprocess.Popen[str]"]


def agents(
    hosts: list[Machine],
    folder: Path,
    *arguments: str,
    nnodes: str = "2",
    meanwhile: Callable[[Agents], None] = lambda started: None,
) -> "list[tuple[int, str]]":
    """The exit code and the output of an agent on each machine."""
    options = ["--nnodes", nnodes, "--nproc-per-node", "1", "--max-restarts", "2", "--rdzv-id", "7"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:29400"]
    quick = ["--rdzv-conf", "last_call_timeout=5"]
    script = [str(SCRIPT), str(folder), *arguments]
    environ = {"GLOO_SOCKET_IFNAME": INTERFACE}
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                popen(*host.command(*TORCHRUN, *options, *rendezvous, *quick, *script), environ=environ)
            )
            for host in hosts
        ]
        try:
            meanwhile(started)
            outputs = [agent.communicate(timeout=LIMIT_S)[0] for agent in started]
        finally:
            for agent in started:
                agent.kill()
    return [(agent.returncode, output) for agent, output in zip(started, outputs, strict=True)]


def test_two_agents_on_two_machines_come_to_the_bits_of_one_worker(
    two: list[Machine], tmp_path: Path, calm: str
) -> None:
    found = agents(two, tmp_path)
    assert [code for code, _ in found] == [0, 0], found
    assert digest_in("".join(output for _, output in found)) == calm


@pytest.mark.parametrize("killed", ["1", "all"])
def test_when_workers_on_two_machines_are_killed_both_agents_restart_and_the_run_resumes(
    killed: str, two: list[Machine], tmp_path: Path, calm: str
) -> None:
    found = agents(two, tmp_path, "--kill", f"{killed}:12")
    assert [code for code, _ in found] == [0, 0], found
    output = "".join(output for _, output in found)
    assert digest_in(output) == calm
    assert "begins at step 10" in output


def test_when_a_machine_is_lost_the_agent_of_the_other_goes_on_alone_if_it_may(
    two: list[Machine], tmp_path: Path, calm: str
) -> None:
    def cut_power(started: Agents) -> None:
        await_file(tmp_path / "reached")
        started[1].kill()
        (tmp_path / "go").touch()

    found = agents(two, tmp_path, "--wait-at", "12", nnodes="1:2", meanwhile=cut_power)
    assert found[0][0] == 0, found
    assert digest_in(found[0][1]) == calm
    assert "begins at step 10" in found[0][1]


def test_agents_on_two_machines_that_are_told_to_end_have_their_workers_save(
    two: list[Machine], tmp_path: Path, calm: str
) -> None:
    def tell(started: Agents) -> None:
        await_file(tmp_path / "reached")
        for machine in started:
            found = psutil.Process(machine.pid).children(recursive=True)
            next(process for process in found if process.cmdline()[1:3] == list(TORCHRUN[1:3])).terminate()
        (tmp_path / "go").touch()

    found = agents(two, tmp_path, "--wait-at", "12", meanwhile=tell)
    assert 0 not in [code for code, _ in found]
    assert "SIGTERM has come: the run is saved and ends after the step" in "".join(output for _, output in found)
    assert_resumed(torchrun(tmp_path, "--nproc-per-node", "3"), calm, "13", "14")
