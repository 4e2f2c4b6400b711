"""On a GPU, too, a side that computes something else is not timed. The sides here train small models on the CPU."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from lockstep.errors import BadArgument
from lockstep.programs.bench.gpu import child
from lockstep.programs.bench.gpu import plan as gpu
from lockstep.programs.bench.gpu.child import open_side
from lockstep.programs.bench.gpu.turns import objection, objection_of_replicas, objections_of_bits
from lockstep.programs.bench.sides import NUM_STEPS, Evidence, LoopSide, make_kit, plain_side
from lockstep.programs.large_models import gpt10m
from lockstep.programs.models import Batch, Workload, mlp, token_loss
from lockstep.state.tensor_file import write_tensors
from lockstep.world import World

torch.set_num_threads(1)  # models this small only wait for other threads

COARSE = gpt10m(batch_size=4, context=8, width=24, num_blocks=1, num_tokens=32)
FINE = mlp(batch_size=8, width=16)
CPU = torch.device("cpu")

Change = Callable[[list[Batch]], list[Batch]]


def make_loop(workload: Workload, change: Change = list) -> LoopSide:
    kit = make_kit(workload, CPU)
    return plain_side(replace(kit, batches=change(list(kit.batches))))


def objection_to(workload: Workload, change: Change) -> str | None:
    wanted = child.train_from_start(make_loop(workload))
    found = child.compare(child.train_from_start(make_loop(workload, change)), wanted)
    return objection("it", found, "plain fused", workload.rounds_coarsely)


def flipped(batches: list[Batch]) -> list[Batch]:
    """The same samples in another order: the same mathematics."""
    return [(inputs.flip(0), targets.flip(0)) for inputs, targets in batches]


def halved(batches: list[Batch]) -> list[Batch]:
    """As if another worker's gradient had never arrived."""
    return [(inputs[: len(inputs) // 2], targets[: len(targets) // 2]) for inputs, targets in batches]


def stale(batches: list[Batch]) -> list[Batch]:
    """As if a graph read the same inputs over and over."""
    return batches[:1]


@pytest.mark.parametrize("workload", [COARSE, FINE], ids=["bfloat16", "float32"])
def test_another_order_of_samples_agrees(workload: Workload) -> None:
    assert objection_to(workload, flipped) is None


@pytest.mark.parametrize("workload", [COARSE, FINE], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("wrong", [halved, stale])
def test_other_data_is_refused(workload: Workload, wrong: Change) -> None:
    assert "it disagrees with plain fused after three steps: its gradients" in str(objection_to(workload, wrong))


@pytest.mark.parametrize("workload", [COARSE, FINE], ids=["bfloat16", "float32"])
def test_a_step_that_was_left_out_is_refused(workload: Workload) -> None:
    wanted, side = child.train_from_start(make_loop(workload)), make_loop(workload)
    for number in range(NUM_STEPS - 1):
        side.step(number)
    found = child.compare(child.evidence_now(side), wanted)
    assert objection("it", found, "plain fused", workload.rounds_coarsely) is not None


@pytest.mark.parametrize("workload", [COARSE, FINE], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("factor", [0.5, -1.0])
def test_a_wrong_update_of_right_gradients_is_refused(workload: Workload, factor: float) -> None:
    wanted = child.train_from_start(make_loop(workload))
    movement = {name: factor * way for name, way in wanted.movement.items()}
    found = child.compare(replace(wanted, movement=movement), wanted)
    assert "its parameters" in str(objection("it", found, "plain fused", workload.rounds_coarsely))


def test_the_same_model_in_float32_agrees_with_itself_in_bfloat16() -> None:
    wanted = child.train_from_start(make_loop(COARSE))
    found = child.compare(child.train_from_start(make_loop(replace(COARSE, loss=token_loss))), wanted)
    assert found["gradients"] > 1e-4
    assert objection("it", found, "plain fused", coarse=True) is None


def evidence_of(*numbers: float) -> Evidence:
    return Evidence({"a": torch.tensor(numbers)}, {"a": torch.tensor(numbers)})


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_is_refused(wrong: float) -> None:
    found = child.compare(evidence_of(1.0, wrong), evidence_of(1.0, 1.0))
    assert objection("it", found, "plain fused", coarse=True) is not None


def test_a_missing_parameter_is_refused() -> None:
    whole = evidence_of(1.0, 1.0)
    more = Evidence(whole.gradients, {**whole.movement, "b": torch.ones(1)})
    assert objection("it", child.compare(whole, more), "plain fused", coarse=True) is not None


def test_a_side_that_starts_anew_comes_to_the_same_bits() -> None:
    side = make_loop(COARSE)
    for number in range(5):
        side.step(number)
    assert child.digest(child.train_from_start(side)) == child.digest(child.train_from_start(make_loop(COARSE)))


def test_one_changed_bit_changes_the_digest() -> None:
    assert child.digest(evidence_of(1.0, 0.0)) != child.digest(evidence_of(1.0, -0.0))


def test_evidence_survives_its_file(tmp_path: Path) -> None:
    written = Evidence({"a b": torch.randn(3, 4).t()}, {"a b": torch.randn(())})
    write_tensors(tmp_path / "evidence", child.tensors_of(written))
    read = child.evidence_from(load_file(str(tmp_path / "evidence")))
    assert child.digest(read) == child.digest(written)


def test_captured_and_sharded_must_hold_the_bits_of_lockstep() -> None:
    same = {gpu.LOCKSTEP: "a", gpu.CAPTURED: "a", gpu.DETERMINISTIC: "b"}
    assert objections_of_bits(same) == {}
    assert list(objections_of_bits({**same, gpu.CAPTURED: "b"})) == [gpu.CAPTURED]
    assert objections_of_bits({gpu.CAPTURED: "a", gpu.DETERMINISTIC: "b"}) == {}
    assert list(objections_of_bits({**same, **dict.fromkeys(gpu.SHARDED, "b")})) == [*gpu.SHARDED]


def test_workers_of_one_side_with_different_bits_are_refused() -> None:
    answers = [{"digest": digest} for digest in ("a", "a", "b")]
    assert "workers 0 and 2 hold other bits" in str(objection_of_replicas("ddp gloo", answers))
    assert objection_of_replicas("ddp gloo", answers[:2]) is None


@pytest.mark.parametrize("name", gpu.NEEDS_CUDA)
def test_a_side_that_is_a_cuda_graph_is_refused_on_the_cpu(name: str, tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(BadArgument, match="is a CUDA graph, and there is none on the CPU"):
        open_side(name, FINE, gpu.GpuStepPlan("gpt10m", 1, (name,), 1, 1, device="cpu"), World(), tmp_path, stack)


@pytest.mark.parametrize("name", [gpu.LOCKSTEP, *gpu.SHARDED])
def test_a_side_is_started_with_the_strategy_of_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Mock(side_effect=BadArgument)
    monkeypatch.setattr(child, "start", started)
    with ExitStack() as stack, pytest.raises(BadArgument):
        open_side(name, FINE, gpu.GpuStepPlan("gpt10m", 2, (name,), 1, 1, device="cpu"), World(), tmp_path, stack)
    assert started.call_args.kwargs["strategy"] == (name.removeprefix("lockstep").strip() or "replicated")


@pytest.mark.parametrize("name", [gpu.DETERMINISTIC, gpu.DDP_DETERMINISTIC])
def test_a_deterministic_side_has_the_kernels_that_lockstep_asks_for(name: str, tmp_path: Path) -> None:
    settled: list[bool] = []
    with ExitStack() as stack:
        stack.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        open_side(name, FINE, gpu.GpuStepPlan("gpt10m", 1, (name,), 1, 1, device="cpu"), World(), tmp_path, stack)
        settled.append(torch.are_deterministic_algorithms_enabled())
    settled.append(torch.are_deterministic_algorithms_enabled())
    assert settled == [True, False]
