"""The benchmark times nothing unless the sides compute the same."""

import copy
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from workers import on_workers

from lockstep.programs.bench.sides import LoopSide, TrainingKit
from lockstep.programs.bench.step.plan import DDP, FSDP, ON_BACKEND, ONE_THREAD, ZERO, CpuStepPlan
from lockstep.programs.bench.step.worker import (
    CpuSide,
    StepDifference,
    agree,
    as_torch_comes,
    comparable,
    compare,
    process_group,
    refusal,
    side_makers,
    take_evidence,
)
from lockstep.programs.models import mlp, reference_workload
from lockstep.run.start import start

SMALL = mlp(batch_size=8, width=16)
MODEL = SMALL.make_model()
BATCHES = [SMALL.make_batch(torch.Generator().manual_seed(seed)) for seed in range(4)]


def make_side(kind: type[LoopSide] = LoopSide) -> CpuSide:
    kit = TrainingKit(SMALL, copy.deepcopy(MODEL), BATCHES)
    return CpuSide(kind(kit, kit.forward(kit.model), torch.optim.AdamW(kit.model.parameters(), fused=True)))


class AddingParts(LoopSide):
    """The same mathematics in another order: adds the gradients of two halves."""

    def compute(self, number: int) -> None:
        inputs, classes = self.batch(number)
        for half in (slice(0, 4), slice(4, 8)):
            (self._forward((inputs[half], classes[half])) / 2).backward()


class HalfTheBatch(LoopSide):
    """As if the other worker's gradient had never arrived."""

    def compute(self, number: int) -> None:
        inputs, classes = self.batch(number)
        self._forward((inputs[:4], classes[:4])).backward()


class StaleGradient(LoopSide):
    """The first step is right; all later ones see the first batch again."""

    def compute(self, number: int) -> None:
        super().compute(0)


def objection_to(kind: type[LoopSide]) -> str | None:
    return refusal("it", compare(take_evidence(make_side(kind)), take_evidence(make_side())), "mlp", rank=0)


def test_another_order_of_additions_agrees() -> None:
    assert objection_to(AddingParts) is None


def test_a_gradient_of_half_the_batch_is_refused() -> None:
    assert "disagree on worker 0: the gradient of" in str(objection_to(HalfTheBatch))


def test_a_side_that_goes_wrong_after_the_first_step_is_refused() -> None:
    assert "after 3 steps the parameters are apart" in str(objection_to(StaleGradient))


def test_a_missing_gradient_is_refused_by_name() -> None:
    whole = take_evidence(make_side())
    gradients = {name: value for name, value in whole.gradients.items() if name != "2.bias"}
    assert compare(replace(whole, gradients=gradients), whole).guilty == "2.bias"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_is_refused(wrong: float) -> None:
    whole = take_evidence(make_side())
    gradients = {**whole.gradients, "2.bias": torch.full((16,), wrong)}
    assert refusal("it", compare(replace(whole, gradients=gradients), whole), "mlp", rank=0) is not None


def test_a_difference_that_is_no_number_is_refused() -> None:
    assert refusal("it", StepDifference(float("nan"), "2.bias", 0.0), "mlp", rank=0) is not None


def test_only_ddp_is_held_against_lockstep_where_shares_are_normalised_by_themselves() -> None:
    assert comparable(reference_workload("cnn"), num_workers=2) == (DDP, ZERO, FSDP, ON_BACKEND)
    assert ONE_THREAD in comparable(reference_workload("cnn"), num_workers=1)


def test_a_restarted_side_computes_the_same_again() -> None:
    side = make_side()
    before, after = take_evidence(side), take_evidence(side)
    assert all(torch.equal(after.movement[name], way) for name, way in before.movement.items())


def test_other_sides_run_as_torch_comes_and_lockstep_finds_its_settings_again() -> None:
    with start():
        with as_torch_comes(threads=1):
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()


def objections_of_workers(folder: str, drifting: int | None) -> str | None:
    """Runs in a worker: what `agree` says there when DDP's optimizer differs on the worker `drifting`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with start() as run:
        store = process_group(Path(folder) / "store", run)
        sides = {name: make() for name, make in side_makers(SMALL, run, all_threads=1).items()}
        if run.rank == drifting:
            sides[DDP].training.optimizer.param_groups[0]["lr"] = 0.1
        return agree(CpuStepPlan("mlp", 2, 1, 1), sides, comparable(SMALL, run.size), run, store)[1]


def test_lockstep_and_ddp_and_the_plain_loop_agree_on_two_workers(tmp_path: Path) -> None:
    assert on_workers(2, objections_of_workers, str(tmp_path), None) == [None, None]


def test_a_replica_that_drifts_on_one_worker_stops_all_of_them(tmp_path: Path) -> None:
    first, second = on_workers(2, objections_of_workers, str(tmp_path), 1)
    assert first == second
    assert "ddp and lockstep disagree on worker" in first
