"""What is measured on a GPU, and what is made of the times. Nothing runs here, and no GPU is needed."""

import io
import json
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner
from report_keys import RECORDED, keys
from rich.console import Console

from lockstep.cli.bench import command
from lockstep.errors import BadArgument, BadEnvironment
from lockstep.programs import large_models
from lockstep.programs.bench.gpu import plan as gpu
from lockstep.programs.bench.gpu import turns
from lockstep.programs.bench.gpu.plan import (
    GPU_REFERENCES,
    SIDES,
    SIDES_OF_SEVERAL,
    GpuOutcome,
    GpuStepPlan,
    SpeedClaim,
    check_claims,
    drawn_order,
    is_whole,
    make_plans,
    make_report,
    make_row,
    parse_sides,
    reference_among,
    show_machine,
    show_row,
)
from lockstep.programs.bench.mps import multi_process_service
from lockstep.programs.models import count_parameters
from lockstep.programs.packages import require
from lockstep.settings.environment import STRATEGIES

MACHINE = {"gpu": "NVIDIA H200", "cores": 16, "torch": "2.11.0", "cuda": "13.0"}


def plan(**changes: Any) -> GpuStepPlan:
    return GpuStepPlan(**{"model": "gpt10m", "workers": 1, "sides": SIDES, "steps": 2, "rounds": 3, **changes})


def row(seconds: dict[str, list[float]], **changes: Any) -> dict[str, Any]:
    return make_row(plan(**changes), GpuOutcome(reference=gpu.FUSED, seconds=seconds, parameters=10_000_000))


def side(made: dict[str, Any], name: str) -> dict[str, Any]:
    return next(side for side in made["sides"] if side["side"] == name)


def shown(report: dict[str, Any]) -> str:
    text = io.StringIO()
    console = Console(file=text)
    for made in report["rows"]:
        show_row(made, console)
    show_machine(report, console)
    return text.getvalue()


# -- plans ----------------------------------------------------------------------------------------------------


def test_a_gpu_plan_reaches_the_children_unchanged() -> None:
    made = plan(sizes={"batch_size": 4})
    assert GpuStepPlan.read(made.written()) == made


def test_one_worker_has_every_side_and_several_have_ddp_over_gloo() -> None:
    one, two = make_plans(("gpt10m",), (1, 2, 1), rounds=1)
    assert one.sides == SIDES
    assert two.sides[0] == two.ddp == gpu.DDP_GLOO


def test_a_side_that_cannot_be_on_several_workers_is_refused_with_those_that_can() -> None:
    with pytest.raises(BadArgument, match="graph by hand cannot be measured on 2 workers: choose from ddp gloo, ddp"):
        make_plans(("mlp",), (2,), (gpu.BY_HAND,))


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_a_strategy_is_a_side_of_its_own_beside_lockstep(strategy: str) -> None:
    name = f"lockstep {strategy}"
    [usual] = make_plans(("mlp",), (2,), strategy=strategy)
    [over_nccl] = make_plans(("mlp",), (2,), strategy=strategy, ranks_share_gpu=True)
    [on_two_gpus] = make_plans(("mlp",), (2,), strategy=strategy, num_gpus=2)
    assert on_two_gpus.sides == over_nccl.sides
    assert usual.sides == (gpu.DDP_GLOO, gpu.LOCKSTEP, name)
    assert over_nccl.sides == (gpu.DDP, gpu.ZERO, gpu.FSDP, gpu.LOCKSTEP, name)
    assert (gpu.strategy_of(name), gpu.strategy_of(gpu.CAPTURED)) == (strategy, "replicated")
    assert parse_sides(f"ddp zero,fsdp2, {name}") == (gpu.ZERO, gpu.FSDP, name)


@pytest.mark.parametrize("nccl_takes_them", [{"ranks_share_gpu": True}, {"num_gpus": 2}, {"num_gpus": 8}], ids=str)
def test_ddp_is_that_over_nccl_where_nccl_takes_the_workers(nccl_takes_them: dict[str, Any]) -> None:
    [made] = make_plans(("mlp",), (2,), **nccl_takes_them)
    assert made.sides == (gpu.DDP, gpu.LOCKSTEP, gpu.NOT_EXACT, gpu.CAPTURED)
    [shared] = make_plans(("mlp",), (2,), num_gpus=1)
    assert shared.sides == (gpu.DDP_GLOO, gpu.LOCKSTEP, gpu.CAPTURED)


@pytest.mark.parametrize("name", gpu.DIVIDED)
def test_a_side_that_divides_the_update_is_refused_on_one_worker(name: str) -> None:
    with pytest.raises(BadArgument, match=f"{name} cannot be measured on 1 worker: choose from plain,"):
        make_plans(("mlp",), (1,), (name,))


def test_a_batch_that_cannot_be_cut_evenly_is_refused_on_a_gpu_too() -> None:
    with pytest.raises(BadArgument, match=r"gpt10m, 16 samples, .* into 3 .* divides 16"):
        make_plans(("gpt10m",), (3,))


def test_a_model_of_the_cpu_is_refused_with_those_of_the_gpu() -> None:
    with pytest.raises(BadArgument, match="'cnn' is not measured on a GPU: choose from mlp, gpt10m"):
        make_plans(("cnn",), (1,))


def test_sides_are_read_with_any_spaces_around_their_words() -> None:
    assert parse_sides(" plain  fused ,ddp") == (gpu.FUSED, gpu.DDP)


@pytest.mark.parametrize("text", ["", "ddp,", "plainfused", "Lockstep"])
def test_what_is_no_side_is_refused_with_all_that_are(text: str) -> None:
    with pytest.raises(BadArgument, match=r"there is no side .*: choose from plain, plain fused"):
        parse_sides(text)


def test_every_round_has_every_side_once_in_an_order_of_its_own() -> None:
    orders = [drawn_order(number, SIDES) for number in range(8)]
    assert all(sorted(each) == sorted(SIDES) for each in orders)
    assert len({tuple(each) for each in orders}) == 8


def test_the_reference_is_the_fused_plain_loop_and_else_ddp() -> None:
    assert reference_among(SIDES) == gpu.FUSED
    assert reference_among((gpu.LOCKSTEP, gpu.DDP)) == gpu.DDP
    assert reference_among((gpu.LOCKSTEP, gpu.CAPTURED)) == gpu.LOCKSTEP


# -- models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("gpt10m", 10_823_424), ("gpt124m", 124_475_904), ("mlp", 6_307_850)])
def test_a_model_of_the_gpu_has_the_size_it_is_known_by(name: str, count: int) -> None:
    with torch.device("meta"):
        assert count_parameters(large_models.LARGE_WORKLOADS[name]().make_model()) == count


def test_gpu_plans_know_the_batch_size_of_every_workload() -> None:
    sizes = {name: reference.batch_size for name, reference in GPU_REFERENCES.items()}
    assert sizes == {name: make().batch_size for name, make in large_models.LARGE_WORKLOADS.items()}


def test_a_large_model_computes_in_bfloat16_and_keeps_its_gradients_in_float32() -> None:
    workload = large_models.gpt124m(batch_size=2, context=4, width=24, num_blocks=1, num_tokens=16)
    model, seen = workload.make_model(), []
    model.get_submodule("blocks.0.up").register_forward_hook(lambda *called: seen.append(called[2].dtype))
    workload.loss(model, workload.make_batch(torch.Generator().manual_seed(0))).backward()
    assert seen == [torch.bfloat16]
    assert all(value.grad is not None and value.grad.dtype == torch.float32 for value in model.parameters())


def test_a_package_that_is_missing_is_named_with_the_model_that_needs_it() -> None:
    with pytest.raises(BadEnvironment, match="the model vit is no_such_package's, which is not installed: pip install"):
        require("no_such_package", "vit")


# -- rows, claims, table --------------------------------------------------------------------------------------


def test_ratios_of_sides_are_made_within_rounds() -> None:
    made = row({gpu.FUSED: [1.0, 2.0, 4.0], gpu.LOCKSTEP: [2.0, 2.0, 12.0]})
    found = side(made, gpu.LOCKSTEP)
    assert [found[f"ratio_to_plain_fused{end}"] for end in ("_low", "", "_high")] == [1, 2, 3]
    assert (found["ms_low"], found["ms"], found["ms_high"]) == (2000, 2000, 12000)
    assert found["ratio_to_ddp"] is None


def test_a_report_of_a_gpu_has_the_keys_that_it_always_had() -> None:
    made = row({name: [1.0] for name in SIDES}, rounds=1)
    report = make_report([made], MACHINE, mps=False, stopped=False)
    assert keys(json.loads(json.dumps(report))) == set(RECORDED["gpu"])


def test_a_side_that_failed_has_a_reason_and_no_times() -> None:
    outcome = GpuOutcome(seconds={gpu.FUSED: [1.0]}, reasons={gpu.DDP: "failed: out of memory"})
    made = make_row(plan(sides=(gpu.FUSED, gpu.DDP), rounds=1), outcome)
    assert (side(made, gpu.DDP)["ms"], side(made, gpu.DDP)["reason"]) == (None, "failed: out of memory")
    assert not is_whole(make_report([made], MACHINE, mps=False, stopped=False))


def test_exactness_and_lockstep_are_each_held_against_a_loop_with_the_same_kernels() -> None:
    seconds = {gpu.FUSED: [1.0], gpu.DETERMINISTIC: [2.0], gpu.LOCKSTEP: [2.01], gpu.NOT_EXACT: [1.5], gpu.DDP: [2.2]}
    found = {claim["claim"]: claim["holds"] for claim in check_claims(plan(rounds=1), seconds)}
    assert found["lockstep is within 1 % of plain deterministic"] is True
    assert found["lockstep exact=False is within 1 % of plain fused"] is False
    assert found["lockstep is not slower than ddp"] is True
    assert found["lockstep captured is 4 times as fast as ddp"] is None


def test_four_times_as_fast_is_claimed_of_the_small_gpt_alone() -> None:
    claims = check_claims(plan(model="gpt124m"), {})
    assert not any("4 times" in claim["claim"] for claim in claims)


def test_a_claim_is_decided_by_the_median_of_the_rounds() -> None:
    seconds = {gpu.CAPTURED: [1.0, 1.0, 9.0], gpu.BY_HAND: [1.0, 1.0, 1.0]}
    [found] = check_claims(plan(sides=(gpu.CAPTURED, gpu.BY_HAND)), seconds)
    assert (found["ratio"], found["holds"]) == (1.0, True)
    assert SpeedClaim(gpu.CAPTURED, gpu.BY_HAND, 1.05).text == "lockstep captured is within 5 % of graph by hand"


@pytest.mark.parametrize(("workers", "sides", "lost"), [(1, SIDES, gpu.COMPILED), (4, SIDES_OF_SEVERAL, gpu.DDP)])
def test_the_gpu_table_fits_100_columns_and_says_why_a_side_is_missing(
    workers: int, sides: tuple[str, ...], lost: str
) -> None:
    seconds = {name: [0.0471, 0.1234, 0.0472] for name in sides if name != lost}
    outcome = GpuOutcome(sides[0], seconds, {lost: "failed: no compiler"}, parameters=124_475_904)
    outcome.evidence = {name: {"gradients": 1.234e-2, "movement": 0.1, "length": 1.0, "digest": None} for name in sides}
    peaks = {"reserved_bytes": 18 * 2**30, "allocated_bytes": 1, "host_bytes": 12 * 2**30}
    outcome.peaks = dict.fromkeys(sides, peaks)
    made = make_row(plan(workers=workers, sides=sides), outcome)
    text = shown(make_report([made], MACHINE, mps=True, stopped=False))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert f"! {lost} failed: no compiler" in text
    assert "47.20 (47.10–123.40)" in text
    assert ("12.0" in text, "÷ plain fused" in text) == (workers > 1, workers == 1)
    assert "under MPS" in text


def test_a_report_of_sides_that_all_failed_can_be_shown() -> None:
    made = make_row(plan(sides=(gpu.FUSED,)), GpuOutcome(reasons={gpu.FUSED: "failed: [no] GPU"}))
    assert "! plain fused failed: [no] GPU" in shown(make_report([made], {}, mps=False, stopped=False))


def test_an_interrupt_ends_the_plans_and_keeps_those_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = GpuOutcome(gpu.FUSED, {gpu.FUSED: [1.0, 1.0]}, machine=MACHINE)
    cut = GpuOutcome(gpu.FUSED, {gpu.FUSED: [1.0]}, machine=MACHINE, stopped=True)
    plans = [plan(model=name, sides=(gpu.FUSED,)) for name in ("mlp", "gpt10m", "vit")]
    for outcomes, kept in (([whole, KeyboardInterrupt], [2]), ([whole, cut], [2, 1]), ([KeyboardInterrupt], [])):
        monkeypatch.setattr(turns, "measure", Mock(side_effect=outcomes))
        taken: list[dict[str, Any]] = []
        report = turns.bench_gpu_steps(plans, Mock(), taken.append, {})
        assert report["stopped"]
        assert [made["rounds"] for made in report["rows"]] == kept
        assert taken == report["rows"]


# -- words and MPS --------------------------------------------------------------------------------------------


def test_mps_that_is_not_wanted_starts_nothing() -> None:
    with multi_process_service(False) as variables:
        assert variables == {}


def test_mps_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadEnvironment, match="--mps needs the program nvidia-cuda-mps-control"):
        multi_process_service(True).__enter__()


SHARDED = ["step", "--device", "cuda", "--strategy", "sharded:optimizer"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["step", "--mps"], "--mps is for a GPU alone: add --device cuda"),
        (["step", "--sides", "ddp"], "--sides is for a GPU alone: add --device cuda"),
        (["step", "--model", "gpt10m"], "the model 'gpt10m' is not measured with --device cpu"),
        (["step", "--device", "cuda", "--model", "wide"], "'wide' is not measured on a GPU"),
        ([*SHARDED, "-n", "1,2"], "one worker updates as without sharding: take -n 2 or more"),
        (SHARDED, "one worker updates as without sharding: take -n 2 or more"),
        ([*SHARDED, "-n", "2", "--sides", "ddp"], "name the side lockstep sharded:optimizer in --sides"),
        (["allreduce", "--mps"], "--mps is for a GPU alone: add --device cuda"),
        (["allreduce", "--device", "cuda", "--algorithm", "ring"], "--algorithm ring is for the CPU"),
    ],
)
def test_a_word_for_another_device_is_refused_with_what_to_write(words: list[str], sentence: str) -> None:
    ended = CliRunner().invoke(command, words)
    assert isinstance(ended.exception, BadArgument)
    assert sentence in str(ended.exception)


def test_a_side_that_is_none_is_refused_by_the_command_line() -> None:
    ended = CliRunner().invoke(command, ["step", "--device", "cuda", "--sides", "plane"], terminal_width=200)
    assert ended.exit_code == 2
    assert "there is no side 'plane': choose from plain, plain fused" in " ".join(ended.output.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("words", [["step", "--model", "mlp"], ["step", "--model", "resnet50"], ["allreduce"]])
def test_a_machine_without_a_gpu_is_told_before_anything_starts(words: list[str]) -> None:
    ended = CliRunner().invoke(command, [*words, "--device", "cuda"])
    assert isinstance(ended.exception, BadEnvironment)
    assert "device='cuda' was asked for" in str(ended.exception)
