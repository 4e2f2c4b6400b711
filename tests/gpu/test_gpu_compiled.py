"""A compiled model on a GPU: one digest on any number of workers, in every way that people compile."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_processes import environment
from together import Outcome, RunPool, Together, Wanted

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

SCRIPT = Path(__file__).parent / "compiled_on_gpu.py"
LIMIT_S = 300.0
ONE_THREAD = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Many processes compile at once here."""


def launch(words: Wanted, folder: Path) -> dict[str, Any]:
    """Trains; or verifies, if the words begin so."""
    first, *arguments = words
    launcher = ["run", "-n", first, "--run-dir", str(folder)]
    verifier = ["verify", "-n", "1,2,3", "--steps", "3", "--no-faults", "--no-distance", "--json"]
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *(verifier if first == "verify" else launcher), str(SCRIPT), *arguments],
        env={**environment(), **ONE_THREAD},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "said": done.stdout + done.stderr}


RUNS = Together(launch, __file__)
run = RUNS.run


@pytest.fixture(scope="module")
def outcome(pool: RunPool) -> Outcome:
    return RUNS.outcomes(pool)


ON_SEVERAL = {
    ("before",): 4,
    ("reduce-overhead",): 3,
    ("max-autotune",): 2,
    ("before", "--capture"): 3,
}
"""The other ways to compile are tried on the CPU, in tests/exactness/test_compiled_models.py."""

ONE = {words: run(1, *words) for words in ON_SEVERAL}  # before the others: what is compiled once is found by those
DYNAMIC = run(1, "dynamic")


@pytest.mark.parametrize(
    ("one", "several"), [(ONE[words], run(number, *words)) for words, number in ON_SEVERAL.items()], ids=str
)
def test_a_compiled_model_has_the_same_bits_on_several_workers(outcome: Outcome, one: Wanted, several: Wanted) -> None:
    got, want = outcome(several), outcome(one)
    assert got["workers"] == int(several[0])
    assert (got["digest"], got["losses"]) == (want["digest"], want["losses"])
    assert "bits may differ" not in got["said"]


@pytest.mark.parametrize("captured", [ONE["before", "--capture"]], ids=str)
def test_a_compiled_lane_is_captured(outcome: Outcome, captured: Wanted) -> None:
    got = outcome(captured)
    assert got["graphs"] > 0, got["said"]


@pytest.mark.parametrize("dynamic", [DYNAMIC], ids=str)
def test_dynamic_shapes_are_named(outcome: Outcome, dynamic: Wanted) -> None:
    assert "a compiled function has dynamic shapes" in outcome(dynamic)["said"]


@pytest.mark.parametrize(("one", "after"), [(ONE["before",], run(1, "before", "--after-cudnn"))], ids=str)
def test_a_graph_that_another_program_compiled_with_cudnns_attention_is_not_taken(
    outcome: Outcome, one: Wanted, after: Wanted
) -> None:
    got = outcome(after)
    assert (got["digest"], got["losses"]) == (outcome(one)["digest"], outcome(one)["losses"])
    assert "not deterministic" not in got["said"]


@pytest.mark.parametrize("verified", [run("verify", "before")], ids=str)
def test_verify_finds_one_digest_of_a_compiled_model_and_lists_what_the_compiler_bakes_in(
    outcome: Outcome, verified: Wanted
) -> None:
    got = outcome(verified)
    assert (got["equal"], len(set(got["digests"].values()))) == (True, 1)
    assert any("attention by scaled_dot_product_attention · random numbers by dropout" in g for g in got["compiled"])
