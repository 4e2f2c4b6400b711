"""`lockstep explain memory`: what it says before a run, by hand and against what a run holds."""

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lockstep.cli.main import lockstep
from lockstep.errors import BadArgument
from lockstep.programs.memory import account
from lockstep.programs.memory.account import (
    STRATEGIES,
    WRITTEN_BYTES,
    BaseMemory,
    WorkersOnHost,
    make_account,
    make_gpu_account,
)
from lockstep.programs.memory.sizes import sizes_of
from lockstep.strategies.sharded.marks import MARKING_BYTES

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "held_once.py"
WIDTH = 1024
LAYER = 4 * WIDTH * (WIDTH + 1)
"""Bytes of a square layer with its bias. The first bucket has one bias, the others have six layers each."""

MODEL = f"""
from torch import nn

def make():
    return nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}) for _ in range(18)))

def number():
    return 7
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL, encoding="utf-8")
    return str(path)


def explain(*words: str) -> Result:
    return CliRunner().invoke(lockstep, ["explain", "memory", *words])


def parts_of(strategy: str, model: str, workers: int, lanes: int) -> dict[str, tuple[int | None, int]]:
    """Bytes of each worker and once, by name; Python and torch take 10 and 100."""
    account = make_account(sizes_of(model, "adamw"), WorkersOnHost(workers, lanes), strategy, BaseMemory(10, 100))
    return {part.name: (part.each, part.once) for part in account.parts}


def test_replicated_holds_everything_in_each_worker(script: str) -> None:
    whole = 18 * LAYER
    assert parts_of("replicated", f"{script}:make", 4, 4) == {
        "Python and torch": (10, 100),
        "parameters": (whole, 0),
        "sum of the gradients": (whole, 0),
        "gradients of lanes": (0, 0),
        "gradients that arrive": (6 * LAYER, 0),
        "optimizer state": (2 * whole, 0),
        "journal of the update": (0, 0),
        "activations of a lane": (None, 0),
    }


def test_sharded_gradients_hold_once_all_but_two_buckets_of_a_lane(script: str) -> None:
    found = parts_of("sharded:gradients", f"{script}:make", 4, 4)
    assert found["Python and torch"] == (WRITTEN_BYTES, 110)
    assert parts_of("sharded:gradients", f"{script}:make", 1, 4)["Python and torch"] == (10, 100)
    assert found["parameters"] == found["sum of the gradients"] == (0, 18 * LAYER)
    assert found["optimizer state"] == (0, 36 * LAYER)
    assert found["gradients of lanes"] == (2 * 6 * LAYER, 0)
    assert found["journal of the update"] == (3 * 4 * 256 * 1024, 0)


def test_a_worker_with_several_lanes_holds_their_partial_sums(script: str) -> None:
    whole = 18 * LAYER
    replicated = parts_of("replicated", f"{script}:make", 2, 8)
    assert (replicated["gradients of lanes"], replicated["gradients that arrive"]) == ((whole, 0), (whole, 0))
    once = parts_of("sharded:gradients", f"{script}:make", 2, 8)
    assert (once["gradients of lanes"], once["sum of the gradients"]) == ((2 * whole, 0), (0, whole))


def test_activations_of_a_reference_model_are_those_of_a_lane() -> None:
    one, four = (parts_of("replicated", "mlp", workers, workers)["activations of a lane"][0] for workers in (1, 4))
    # By hand: the input of each of 7 layers, and of ReLU the output, which is the next layer's input; then the softmax.
    assert one == pytest.approx(64 * 4 * (7 * 1024 + 10), rel=0.02)
    assert four == pytest.approx(one / 4, rel=0.01)


def test_the_command_shows_every_strategy_or_one_beside_replicated(script: str) -> None:
    everything = explain("--model", f"{script}:make", "-n", "2")
    assert everything.exit_code == 0
    assert "sharded:parameters takes 0." in everything.output
    assert "Activations are not known" in everything.output
    one = json.loads(explain("--model", "mlp", "-n", "2", "--strategy", "sharded:optimizer", "--json").output)
    assert list(one) == ["replicated", "sharded:optimizer"]
    assert one["replicated"]["host_bytes"] > one["sharded:optimizer"]["host_bytes"]


def test_on_gpus_each_has_its_part_of_the_state_and_the_host_all_of_it_twice(script: str) -> None:
    whole = 18 * LAYER
    sizes = sizes_of(f"{script}:make", "adamw")
    accounts = [make_gpu_account(sizes, WorkersOnHost(4, 4), name) for name in STRATEGIES]
    replicated, divided, on_host, leaving = accounts
    held = {part.name: (part.each, part.once) for part in divided.parts}
    assert held["parameters"] == (whole, whole)
    assert held["optimizer state"] == (2 * whole // 4, 4 * whole)
    assert held["buffer for parameters"] == (whole // 4, 0)
    assert (replicated.host_bytes, divided.host_bytes) == (0, 5 * whole)
    assert replicated.worker_bytes - divided.worker_bytes == 1.5 * whole - whole // 4
    held = {part.name: (part.each, part.once) for part in on_host.parts}
    assert held["sum of the gradients"] == (0, whole)
    assert held["gradients for the update"] == (whole // 4, 0)
    assert 0 < held["gradients of lanes"][0] < whole
    assert on_host.host_bytes == 6 * whole
    held = {part.name: (part.each, part.once) for part in leaving.parts}
    assert held["parameters"] == (whole, whole)  # nobody knows the activations
    assert leaving.worker_bytes - on_host.worker_bytes == held["marks of parameters"][0] == MARKING_BYTES
    alone = {make_gpu_account(sizes, WorkersOnHost(1, 4), strategy).worker_bytes for strategy in STRATEGIES}
    assert len(alone) == 1


@pytest.mark.parametrize(("sample_bytes", "share"), [(0, 1.0), (LAYER, 16 / 18), (1000 * LAYER, 0.5)])
def test_on_gpus_parameters_leave_as_much_room_as_activations_need(
    script: str, monkeypatch: pytest.MonkeyPatch, sample_bytes: int, share: float
) -> None:
    """Until only the last ones are there, which have not left: here half of them."""
    monkeypatch.setattr(account, "GROUP_BYTES", 9 * LAYER)
    sizes = replace(sizes_of(f"{script}:make", "adamw"), batch_size=8, sample_bytes=sample_bytes)
    parts = {part.name: part.each for part in make_gpu_account(sizes, WorkersOnHost(4, 4), STRATEGIES[3]).parts}
    assert parts["activations of a lane"] == 2 * sample_bytes
    assert parts["parameters"] == share * 18 * LAYER


def test_the_command_says_what_is_on_each_gpu(script: str) -> None:
    shown = explain("--model", "gpt50m", "-n", "4", "--device", "cuda")
    assert "sharded:optimizer takes 0." in shown.output
    assert "sharded:gradients takes 0." in shown.output
    assert "sharded:parameters takes 0." in shown.output
    assert "CUDA itself" in shown.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--model", "tiny"), "mlp, wide, gpt, cnn"),
        (("--model", "SCRIPT:nothing"), "there is no function nothing"),
        (("--model", "SCRIPT:number"), "gave a int"),
        (("--model", "mlp", "--optimizer", "magic"), "one of adamw, adam, sgd"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(script: str, words: tuple[str, ...], sentence: str) -> None:
    outcome = explain(*(word.replace("SCRIPT", script) for word in words))
    assert isinstance(outcome.exception, BadArgument)
    assert sentence in str(outcome.exception)


def compare(strategy: str, workers: int) -> None:
    """What a run of a GPT with 50 million parameters holds is within a tenth of what was said before."""
    benchmark: dict[str, Any] = runpy.run_path(str(BENCHMARK), run_name="benchmark")
    held, said = benchmark["measure"](strategy, workers)["pss_bytes"], benchmark["predict"](strategy, workers)
    assert said == pytest.approx(held, rel=0.1)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_what_is_said_before_is_within_a_tenth_of_what_a_run_holds() -> None:
    compare("sharded:gradients", 2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_on_four_workers_under_every_strategy(strategy: str) -> None:
    compare(strategy, 4)
