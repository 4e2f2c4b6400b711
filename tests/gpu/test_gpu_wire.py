"""Sums in GPU memory that workers open to each other, by real processes that share a real GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
from gpu_processes import environment

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parent / "wire_on_gpu.py"


def lines(mode: str, size: int) -> list[str]:
    words = [sys.executable, str(SCRIPT), mode, str(size)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.strip().splitlines())


@pytest.mark.parametrize("size", [2, 3])
def test_every_kind_of_sum_has_the_bits_of_torch_bracket_by_bracket(gpu: None, size: int) -> None:
    assert lines("add", size) == [f"{rank}: []" for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3])
def test_slices_are_scattered_and_gathered_with_the_bits_of_torch(gpu: None, size: int) -> None:
    assert lines("conform", size) == [f"{rank}: []" for rank in range(size)]


def test_nccl_scatters_and_gathers_slices_on_a_gpu_of_its_own(gpu: None) -> None:
    """One worker: NCCL shares no GPU. More are played on the CPU, in tests/wire/test_reducer_conformance.py."""
    assert lines("nccl", 1) == ["0: []"]


def test_a_killed_worker_is_named_by_all_others(gpu: None) -> None:
    found = lines("SIGKILL", 3)
    assert len(found) == 2
    assert all("worker 1 at 50: its process has ended" in line for line in found)


def test_a_worker_that_is_silent_for_too_long_is_named(gpu: None) -> None:
    found = lines("SIGSTOP", 3)
    assert len(found) == 2
    assert all("worker 1 at 50: " in line for line in found)
    assert any("its GPU has been silent for 10 s" in line for line in found)
