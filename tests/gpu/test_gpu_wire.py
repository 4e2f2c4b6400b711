"""Sums between GPUs by real processes that share a real GPU: in memory that they open to each other, and by NCCL.

NCCL takes one GPU of one host for one worker, so each worker is a host of its own to it (NCCL_HOSTID): they talk over
sockets, as between real hosts. `hosts` are such workers whose messages go by Gloo, as between real hosts too.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_processes import environment
from together import Outcome, RunPool, Together, Wanted

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

SCRIPT = Path(__file__).parent / "wire_on_gpu.py"

LIMIT_S = 200.0
NCCL = ("--wire", "nccl")
HOSTS = ("--wire", "hosts")


def launch(words: Wanted, folder: Path) -> list[str]:
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.strip().splitlines())


RUNS = Together(launch, __file__)
run = RUNS.run


@pytest.fixture(scope="module")
def lines(pool: RunPool) -> Outcome:
    """What the workers of a run printed, by rank."""
    return RUNS.outcomes(pool)


def nothing_is_wrong(words: Wanted) -> list[str]:
    return [f"{rank}: []" for rank in range(int(words[1]))]


@pytest.mark.parametrize(
    "adding",
    [
        run("add", 3),
        run("add", 2, *NCCL),
        run("add", 3, *HOSTS),
        run("add", 4, *NCCL),
    ],
    ids=str,
)
def test_every_kind_of_sum_has_the_bits_of_torch_bracket_by_bracket(lines: Outcome, adding: Wanted) -> None:
    assert lines(adding) == nothing_is_wrong(adding)


@pytest.mark.parametrize("adding", [run("add", size, *NCCL, "--native") for size in (2, 3)], ids=str)
def test_nccls_own_sum_of_whole_numbers_is_right_in_every_dtype(lines: Outcome, adding: Wanted) -> None:
    assert lines(adding) == nothing_is_wrong(adding)


@pytest.mark.parametrize("slicing", [run("conform", 3), run("conform", 1, *NCCL), run("conform", 3, *NCCL)], ids=str)
def test_slices_are_scattered_and_gathered_with_the_bits_of_torch(lines: Outcome, slicing: Wanted) -> None:
    assert lines(slicing) == nothing_is_wrong(slicing)


@pytest.mark.parametrize("killed", [run("SIGKILL", 3), run("SIGKILL", 3, *NCCL)], ids=str)
def test_a_killed_worker_is_named_by_all_others(lines: Outcome, killed: Wanted) -> None:
    found = lines(killed)
    assert len(found) == 2
    assert all(re.search("worker 1 at (49|50): its process has ended", line) for line in found), found


@pytest.mark.parametrize("killed", [run("SIGKILL", 3, *HOSTS)], ids=str)
def test_a_killed_worker_of_another_host_is_named_by_all_others(lines: Outcome, killed: Wanted) -> None:
    found = lines(killed)
    assert len(found) == 2
    assert all(re.search("worker 1 at (49|50): ", line) for line in found), found


@pytest.mark.parametrize("stopped", [run("SIGSTOP", 3)], ids=str)
def test_a_worker_that_is_silent_for_too_long_is_named(lines: Outcome, stopped: Wanted) -> None:
    found = lines(stopped)
    assert len(found) == 2
    assert all(re.search("worker 1 at (49|50): ", line) for line in found), found
    assert any("its GPU has been silent for 10 s" in line for line in found)


@pytest.mark.parametrize("stopped", [run("SIGSTOP", 3, *NCCL), run("SIGSTOP", 3, *HOSTS)], ids=str)
def test_nccl_is_not_waited_for_longer_than_the_limit(lines: Outcome, stopped: Wanted) -> None:
    found = lines(stopped)
    assert len(found) == 2
    assert all(re.search(" at (49|50): ", line) for line in found)
    assert any("a sum on the GPUs has not ended for 10 s" in line for line in found)


@pytest.mark.parametrize(
    "killed", [run("connecting-0", 3, *NCCL), run("connecting-1", 3, *NCCL), run("connecting-0", 3, *HOSTS)], ids=str
)
def test_a_worker_killed_while_a_communicator_is_made_does_not_stop_the_others(lines: Outcome, killed: Wanted) -> None:
    victim = int(killed[0][-1])
    others = [rank for rank in range(3) if rank != victim]
    assert lines(killed) == [f"{rank}: worker {victim}, then [3.0]" for rank in others]
