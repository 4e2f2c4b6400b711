"""What needs two GPUs or more in one host: `python -m pytest -m gpus`. Everything else is tested on one.

Workers have a GPU each. NCCL then talks as the GPUs are connected, not over sockets, and workers that open each other's
memory reach into another GPU.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpus, pytest.mark.timeout(600)]

Launched = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = Path(__file__).parent / "lanes_on_gpu.py"


@pytest.fixture(scope="module")
def several(num_gpus: int) -> int:
    """As many workers as there are GPUs, at most eight: as many as there are lanes."""
    if num_gpus < 2:
        pytest.skip(f"two GPUs are needed, and there are {num_gpus}")
    return min(num_gpus, 8)


def told(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "said": done.stdout + done.stderr}


@pytest.fixture(scope="module")
def alone(several: int, launched: Launched) -> dict[str, Any]:
    return told(launched(1, SCRIPT, "resnet"))


def test_a_gpu_for_each_worker_means_nccl_and_the_bits_of_one(
    several: int, launched: Launched, alone: dict[str, Any]
) -> None:
    got = told(launched(several, SCRIPT, "resnet"))
    assert "wire: NCCL" in got["said"]
    assert (got["workers"], got["digest"]) == (several, alone["digest"])


def test_memory_of_another_gpu_is_added_to_the_bits_of_one(
    several: int, launched: Launched, alone: dict[str, Any]
) -> None:
    got = told(launched(several, SCRIPT, "resnet", "--memory-of-others"))
    assert "wire: GPU memory" in got["said"]
    assert (got["workers"], got["digest"]) == (several, alone["digest"])


def test_captured_lanes_on_several_gpus_have_the_bits_of_one(
    several: int, launched: Launched, alone: dict[str, Any]
) -> None:
    assert told(launched(several, SCRIPT, "resnet", "--captured"))["digest"] == alone["digest"]


@pytest.mark.parametrize("memory", [(), ("--memory-of-others",)], ids=["NCCL", "GPU memory"])
def test_a_worker_killed_on_its_own_gpu_costs_nothing(
    several: int, launched: Launched, alone: dict[str, Any], memory: tuple[str, ...]
) -> None:
    got = told(launched(several, SCRIPT, "resnet", "--fault", "1:4:before reduce", *memory))
    assert "was killed by SIGKILL" in got["said"]
    assert got["digest"] == alone["digest"]


def test_more_workers_than_gpus_share_them_in_gpu_memory(
    several: int, launched: Launched, alone: dict[str, Any]
) -> None:
    got = told(launched(several + 1, SCRIPT, "resnet", "--lanes", "9"))
    assert "wire: GPU memory" in got["said"]
    assert got["digest"] == told(launched(1, SCRIPT, "resnet", "--lanes", "9"))["digest"]
