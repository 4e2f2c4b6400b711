"""Models, optimizers and data on a real GPU: what the meta device cannot show."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

Launched = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = Path(__file__).parent / "training_on_gpu.py"


def told(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


@pytest.fixture(scope="module")
def facts(launched: Launched, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return told(launched(1, SCRIPT, "--checkpoint", str(tmp_path_factory.mktemp("facts") / "saved")))


def test_a_model_goes_to_the_gpu_with_the_same_parameters_and_its_optimizers_state(facts: dict[str, Any]) -> None:
    assert facts["device"] == "cuda:0"
    assert facts["same_parameters"]
    assert (facts["parameters"], facts["buffers"]) == (["cuda"], ["cuda"])
    assert (facts["steps_of_adam"], facts["averages_of_adam"]) == (["cpu"], ["cuda"])


def test_lanes_arrive_on_the_gpu_wherever_the_batch_comes_from(facts: dict[str, Any]) -> None:
    assert [facts[source] for source in ("from_loader", "plain", "evaluated")] == [["cuda"], ["cuda"], ["cuda"]]


def test_tensors_on_the_gpu_are_totalled_and_come_back_there(facts: dict[str, Any]) -> None:
    assert (facts["total"], facts["total_on"]) == ([1.0, 1.0], "cuda")


def test_cublas_is_trusted_without_a_variable_that_costs(facts: dict[str, Any]) -> None:
    assert facts["workspace"] is None
    assert facts["warnings"] == []


def test_bits_are_the_same_on_one_worker_and_on_two_and_with_loader_processes(launched: Launched) -> None:
    alone = told(launched(1, SCRIPT))["digest"]
    assert told(launched(2, SCRIPT))["digest"] == alone
    assert told(launched(1, SCRIPT, "--processes", "2"))["digest"] == alone


def test_the_start_line_names_the_gpu(launched: Launched) -> None:
    done = launched(1, SCRIPT, options=("--device", "cuda:0"))
    assert "exact · cuda:0 (" in done.stdout + done.stderr


def test_a_gpu_that_is_not_there_is_an_error_of_the_environment(launched: Launched) -> None:
    done = launched(1, SCRIPT, options=("--device", "cuda:63"))
    assert done.returncode == 3
    assert "device='cuda:63' was asked for" in done.stdout + done.stderr
