"""The checks: each finding appears for its reason and goes away with its advice."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

import lockstep
from lockstep.errors import BadArgument
from lockstep.optim.findings import Finding, check
from lockstep.optim.groups import exclude_biases_and_norms
from lockstep.optim.lamb import LAMB
from lockstep.optim.lars import LARS
from lockstep.optim.rules import scale_lr
from lockstep.optim.warmup import WarmUp


@dataclass(frozen=True)
class Measured:
    critical_batch: float
    sure: bool = True


def net(norm: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), norm or nn.BatchNorm1d(4), nn.Linear(4, 2))


def sgd(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def kinds(findings: list[Finding]) -> list[str]:
    return [finding.kind for finding in findings]


def test_a_clean_model_gives_nothing() -> None:
    model = net()
    optimizer = torch.optim.AdamW(exclude_biases_and_norms(model, 0.1), lr=0.1)
    scale_lr(optimizer, batch=256, base_batch=32)
    scheduler = WarmUp(optimizer, steps=10)
    assert check(model, optimizer, num_lanes=8, batch=256, noise=Measured(1e4), scheduler=scheduler) == []


def test_batch_norm_over_few_samples_of_a_lane_is_found() -> None:
    model = net()
    (finding,) = check(model, sgd(model), num_lanes=8, batch=127)
    assert finding.kind == "batch norm"
    assert "batch 127 over 8 lanes leaves 15 samples" in finding.text
    assert "(1, first: 1)" in finding.text
    assert "sync_batchnorm" in finding.text


def test_batch_norm_over_sixteen_samples_is_fine() -> None:
    model = net()
    assert check(model, sgd(model), num_lanes=8, batch=128) == []


def test_a_model_that_is_a_batch_norm_is_found_by_its_class() -> None:
    model = nn.BatchNorm1d(4)
    assert "first: BatchNorm1d" in check(model, sgd(model), num_lanes=8, batch=8)[0].text


def test_a_synchronised_batch_norm_is_fine() -> None:
    model = lockstep.sync_batchnorm(net())
    assert check(model, sgd(model), num_lanes=8, batch=8) == []


def test_torchs_synchronised_batch_norm_is_fine() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net())
    assert check(model, sgd(model), num_lanes=8, batch=8) == []


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True)])
def test_norms_of_single_samples_are_fine(norm: nn.Module) -> None:
    model = net(norm)
    assert check(model, sgd(model), num_lanes=8, batch=8) == []


def test_a_frozen_batch_norm_in_a_training_model_is_fine() -> None:
    model = net()
    model[1].eval()
    assert check(model, sgd(model), num_lanes=8, batch=8) == []


def test_batch_norm_is_found_in_a_model_that_is_being_evaluated() -> None:
    model = net().eval()
    assert kinds(check(model, sgd(model), num_lanes=8, batch=8)) == ["batch norm"]


@pytest.mark.parametrize("known", [{"num_lanes": 8}, {"batch": 8}, {}])
def test_without_lanes_and_batch_nothing_is_said_of_batch_norm(known: dict[str, int]) -> None:
    model = net()
    assert check(model, sgd(model), **known) == []


def test_decayed_biases_and_norms_are_counted_and_the_first_is_named() -> None:
    model = net()
    (finding,) = check(model, sgd(model, weight_decay=0.1))
    assert finding.kind == "weight decay"
    assert "(4, first: 0.bias)" in finding.text  # two biases, and weight and bias of the norm
    assert "exclude_biases_and_norms(model, weight_decay)" in finding.text


def test_a_frozen_bias_does_not_decay() -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    assert check(model, sgd(model, weight_decay=0.1)) == []


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_adapted_biases_and_norms_are_found(kind: type[Optimizer]) -> None:
    model = net()
    (finding,) = check(model, kind(model.parameters(), lr=0.1))
    assert finding.kind == "adaptation"
    assert "(4, first: 0.bias)" in finding.text


@pytest.mark.parametrize("kind", [LARS, LAMB, torch.optim.AdamW, torch.optim.SGD])
def test_the_advice_on_small_parameters_clears_its_finding(kind: type[Optimizer]) -> None:
    model = net()
    assert check(model, kind(exclude_biases_and_norms(model, 0.1), lr=0.1)) == []


def scaled(model: nn.Module) -> Optimizer:
    optimizer = sgd(model)
    scale_lr(optimizer, batch=256, base_batch=32)
    return optimizer


def test_a_scaled_rate_without_a_scheduler_is_found() -> None:
    model = net()
    (finding,) = check(model, scaled(model))
    assert finding.kind == "warm-up"
    assert "scaled from 0.1 to 0.8 and starts there at once" in finding.text
    assert "WarmUp(optimizer, steps=...)" in finding.text


def cosine(optimizer: Optimizer) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=10)


COLD = {
    "a cosine": cosine,
    "a linear decay": lambda optimizer: LinearLR(optimizer, start_factor=1.0, end_factor=0.1),
    "a function that falls": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "a chain of cosines": lambda optimizer: ChainedScheduler([cosine(optimizer), cosine(optimizer)]),
}
WARM = {
    "a warm-up": lambda optimizer: WarmUp(optimizer, steps=5),
    "torch's linear warm-up": lambda optimizer: LinearLR(optimizer, start_factor=0.1),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.8, total_steps=10),
    "a function that rises": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, step / 5)),
    "a warm-up in a chain": lambda optimizer: ChainedScheduler([WarmUp(optimizer, steps=5), cosine(optimizer)]),
    "a warm-up in a sequence in a chain": lambda optimizer: ChainedScheduler(
        [SequentialLR(optimizer, [WarmUp(optimizer, steps=5), cosine(optimizer)], milestones=[5])]
    ),
}


@pytest.mark.parametrize("name", COLD)
def test_a_scheduler_that_starts_high_is_no_warm_up(name: str) -> None:
    model = net()
    optimizer = scaled(model)
    assert kinds(check(model, optimizer, scheduler=COLD[name](optimizer))) == ["warm-up"]


@pytest.mark.parametrize("name", WARM)
def test_a_scheduler_that_rises_is_a_warm_up(name: str) -> None:
    model = net()
    optimizer = scaled(model)
    assert check(model, optimizer, scheduler=WARM[name](optimizer)) == []


def test_a_schedule_that_has_come_down_still_lacks_its_warm_up() -> None:
    model = net()
    optimizer = scaled(model)
    scheduler = cosine(optimizer)
    for _ in range(10):
        optimizer.step()
        scheduler.step()
    assert kinds(check(model, optimizer, scheduler=scheduler)) == ["warm-up"]


@pytest.mark.parametrize("batch", [32, 8])
def test_a_rate_that_was_not_raised_needs_no_warm_up(batch: int) -> None:
    model = net()
    optimizer = sgd(model)
    scale_lr(optimizer, batch=batch, base_batch=32)
    assert check(model, optimizer) == []


def test_a_batch_beyond_the_critical_one_is_found() -> None:
    model = net()
    (finding,) = check(model, sgd(model), batch=1025, noise=Measured(1024.0))
    assert finding.kind == "critical batch"
    assert "batch 1025 is beyond the critical batch of about 1024" in finding.text


@pytest.mark.parametrize("noise", [Measured(1024.0, sure=False), Measured(1025.0), Measured(math.inf)])
def test_a_batch_that_is_not_surely_beyond_is_fine(noise: Measured) -> None:
    model = net()
    assert check(model, sgd(model), batch=1025, noise=noise) == []


def test_without_a_batch_nothing_is_said_of_the_critical_one() -> None:
    model = net()
    assert check(model, sgd(model), noise=Measured(1.0)) == []


def test_every_finding_is_one_line() -> None:
    model = net()
    optimizer = LAMB(model.parameters(), lr=0.1, weight_decay=0.1)
    scale_lr(optimizer, batch=64, base_batch=32)
    found = check(model, optimizer, num_lanes=8, batch=64, noise=Measured(1.0))
    assert kinds(found) == ["batch norm", "weight decay", "adaptation", "warm-up", "critical batch"]
    assert [str(finding).count("\n") for finding in found] == [0] * 5
    assert str(found[0]).startswith("batch norm: ")


def test_checking_prints_nothing_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    optimizer = scaled(model)
    before = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    check(model, optimizer, num_lanes=8, batch=8, noise=Measured(1.0))
    assert {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} == before
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, True, "8"])
@pytest.mark.parametrize("name", ["num_lanes", "batch"])
def test_what_is_no_count_is_refused(name: str, value: Any) -> None:
    model = net()
    with pytest.raises(BadArgument, match=f"{name}=.* write a whole number of at least 1"):
        check(model, sgd(model), **{name: value})


def test_something_else_than_a_model_is_refused() -> None:
    with pytest.raises(BadArgument, match=r"list is not a model; give a torch\.nn\.Module"):
        check([], sgd(net()))  # type: ignore[arg-type]


def test_something_else_than_an_optimizer_is_refused() -> None:
    with pytest.raises(BadArgument, match="Sequential is not an optimizer"):
        check(net(), net())  # type: ignore[arg-type]


def test_something_else_than_a_noise_scale_is_refused() -> None:
    model = net()
    with pytest.raises(BadArgument, match=r"noise=3\.0 is not a measured noise scale"):
        check(model, sgd(model), batch=8, noise=3.0)  # type: ignore[arg-type]


def test_another_optimizers_scheduler_is_refused() -> None:
    model = net()
    with pytest.raises(BadArgument, match="CosineAnnealingLR is not a scheduler of this optimizer"):
        check(model, sgd(model), scheduler=cosine(sgd(model)))


def test_the_page_prints_a_line_for_each_finding(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "scaling.md").read_text(encoding="utf-8")
    code = page.partition("## Checks")[2].partition("```python\n")[2].partition("```")[0]
    model = net()
    optimizer = scaled(model)
    exec(code, {"model": model, "optimizer": optimizer, "scheduler": cosine(optimizer)})
    assert capsys.readouterr().out.startswith("warm-up: the rate was scaled from 0.1 to 0.8")
