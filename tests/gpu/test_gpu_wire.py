"""Sums between GPUs by real processes that share a real GPU: in memory that they open to each other, and by NCCL.

NCCL takes one GPU of one host for one worker, so each worker is a host of its own to it (NCCL_HOSTID): they talk over
sockets, as between real hosts. `hosts` are such workers whose messages go by Gloo, as between real hosts too.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from gpu_processes import environment

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parent / "wire_on_gpu.py"

NCCL = ("--wire", "nccl")
HOSTS = ("--wire", "hosts")


def lines(mode: str, size: int, *options: str) -> list[str]:
    words = [sys.executable, str(SCRIPT), mode, str(size), *options]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.strip().splitlines())


@pytest.mark.parametrize(("size", "options"), [(2, ()), (3, ()), (2, NCCL), (3, NCCL), (4, NCCL), (3, HOSTS)], ids=str)
def test_every_kind_of_sum_has_the_bits_of_torch_bracket_by_bracket(
    gpu: None, size: int, options: tuple[str, ...]
) -> None:
    assert lines("add", size, *options) == [f"{rank}: []" for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_nccls_own_sum_of_whole_numbers_is_right_in_every_dtype(gpu: None, size: int) -> None:
    assert lines("add", size, *NCCL, "--native") == [f"{rank}: []" for rank in range(size)]


@pytest.mark.parametrize(("size", "options"), [(2, ()), (3, ()), (1, NCCL), (3, NCCL)], ids=str)
def test_slices_are_scattered_and_gathered_with_the_bits_of_torch(
    gpu: None, size: int, options: tuple[str, ...]
) -> None:
    assert lines("conform", size, *options) == [f"{rank}: []" for rank in range(size)]


@pytest.mark.parametrize("options", [(), NCCL], ids=str)
def test_a_killed_worker_is_named_by_all_others(gpu: None, options: tuple[str, ...]) -> None:
    found = lines("SIGKILL", 3, *options)
    assert len(found) == 2
    assert all("worker 1 at 50: its process has ended" in line for line in found)


def test_a_killed_worker_of_another_host_is_named_by_all_others(gpu: None) -> None:
    found = lines("SIGKILL", 3, *HOSTS)
    assert len(found) == 2
    assert all("worker 1 at 50: " in line for line in found)


def test_a_worker_that_is_silent_for_too_long_is_named(gpu: None) -> None:
    found = lines("SIGSTOP", 3)
    assert len(found) == 2
    assert all("worker 1 at 50: " in line for line in found)
    assert any("its GPU has been silent for 10 s" in line for line in found)


@pytest.mark.parametrize("options", [NCCL, HOSTS], ids=str)
def test_nccl_is_not_waited_for_longer_than_the_limit(gpu: None, options: tuple[str, ...]) -> None:
    found = lines("SIGSTOP", 3, *options)
    assert len(found) == 2
    assert all(" at 50: " in line for line in found)
    assert any("a sum on the GPUs has not ended for 10 s" in line for line in found)


@pytest.mark.parametrize("options", [NCCL, HOSTS], ids=str)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_killed_while_a_communicator_is_made_does_not_stop_the_others(
    gpu: None, victim: int, options: tuple[str, ...]
) -> None:
    found = lines(f"connecting-{victim}", 3, *options)
    others = [rank for rank in range(3) if rank != victim]
    assert found == [f"{rank}: worker {victim}, then [3.0]" for rank in others]
