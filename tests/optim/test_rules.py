"""The scaling rules: exact values, what follows, what is refused."""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from lockstep.errors import BadArgument, Misuse
from lockstep.optim.lamb import LAMB
from lockstep.optim.rules import Change, Scaled, scale_lr

Make = Callable[..., Optimizer]


def make(kind: Make, **options: Any) -> Optimizer:
    return kind([nn.Parameter(torch.ones(2))], **options)


def two_groups(**options: Any) -> Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(2))], "lr": 0.01}]
    return torch.optim.SGD(groups, lr=0.1, **options)


def group_of(optimizer: Optimizer) -> dict[str, Any]:
    return optimizer.param_groups[0]


@pytest.mark.parametrize(("rule", "rate"), [("linear", 0.1 * 16), ("sqrt", 0.1 * 4), ("none", 0.1)])
def test_each_rule_gives_its_rate(rule: str, rate: float) -> None:
    optimizer = make(torch.optim.SGD, lr=0.1)
    scale_lr(optimizer, batch=1024, base_batch=64, rule=rule)
    assert group_of(optimizer)["lr"] == rate


def test_a_smaller_batch_gets_a_smaller_rate() -> None:
    optimizer = make(torch.optim.SGD, lr=0.1)
    scale_lr(optimizer, batch=64, base_batch=256)
    assert group_of(optimizer)["lr"] == 0.1 / 4


def test_every_group_is_scaled_from_its_own_rate() -> None:
    optimizer = two_groups()
    scale_lr(optimizer, batch=32, base_batch=8)
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 0.04]
    assert [group["scaled_from"] for group in optimizer.param_groups] == [0.1, 0.01]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
def test_under_sqrt_the_averages_remember_as_many_samples_as_before(kind: Make) -> None:
    optimizer = make(kind, lr=1e-3, betas=(0.9, 0.999))
    scale_lr(optimizer, batch=256, base_batch=64, rule="sqrt")
    assert group_of(optimizer)["betas"] == (1 - 4 * (1 - 0.9), 1 - 4 * (1 - 0.999))


def test_under_sqrt_eps_shrinks_by_the_root() -> None:
    optimizer = make(torch.optim.Adam, lr=1e-3, eps=1e-8)
    scale_lr(optimizer, batch=256, base_batch=64, rule="sqrt")
    assert group_of(optimizer)["eps"] == 1e-8 / 2


def test_a_beta_stops_at_zero_and_the_result_says_so() -> None:
    optimizer = make(torch.optim.Adam, lr=1e-3, betas=(0.9, 0.999))
    scaled = scale_lr(optimizer, batch=1024, base_batch=64, rule="sqrt")
    assert group_of(optimizer)["betas"][0] == 0.0
    assert scaled.lost == ("beta1",)
    assert "beta1 reached 0" in str(scaled)


def test_a_beta_that_was_zero_before_is_not_called_lost() -> None:
    optimizer = make(torch.optim.Adam, lr=1e-3, betas=(0.0, 0.999))
    assert scale_lr(optimizer, batch=128, base_batch=64, rule="sqrt").lost == ()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam])
def test_under_sqrt_decoupled_decay_per_epoch_stays(kind: Make) -> None:
    decoupled = {} if kind is torch.optim.AdamW else {"decoupled_weight_decay": True}
    optimizer = make(kind, lr=1e-3, weight_decay=0.1, **decoupled)
    scale_lr(optimizer, batch=256, base_batch=64, rule="sqrt")
    group = group_of(optimizer)
    assert group["weight_decay"] == 0.2
    assert group["lr"] * group["weight_decay"] * (100 // 4) == pytest.approx(1e-3 * 0.1 * 100)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop])
def test_coupled_decay_is_part_of_the_loss_and_stays(kind: Make) -> None:
    optimizer = make(kind, lr=1e-3, weight_decay=0.1)
    scale_lr(optimizer, batch=256, base_batch=64, rule="sqrt")
    assert group_of(optimizer)["weight_decay"] == 0.1


class MyLAMB(LAMB):
    pass


@pytest.mark.parametrize("kind", [LAMB, MyLAMB, torch.optim.AdamW])
def test_decay_of_lamb_follows_like_that_of_adamw(kind: Make) -> None:
    optimizer = make(kind, lr=1e-3, weight_decay=0.1)
    scale_lr(optimizer, batch=256, base_batch=64, rule="sqrt")
    assert group_of(optimizer)["weight_decay"] == 0.2


def test_rmsprops_alpha_and_eps_follow() -> None:
    optimizer = make(torch.optim.RMSprop, lr=0.01, alpha=0.99, eps=1e-6)
    scale_lr(optimizer, batch=256, base_batch=64, rule="sqrt")
    assert (group_of(optimizer)["alpha"], group_of(optimizer)["eps"]) == (1 - 4 * (1 - 0.99), 1e-6 / 2)


def test_asgds_alpha_is_no_average_and_stays() -> None:
    optimizer = make(torch.optim.ASGD, lr=0.01, alpha=0.75)
    scale_lr(optimizer, batch=256, base_batch=64, rule="sqrt")
    assert group_of(optimizer)["alpha"] == 0.75


@pytest.mark.parametrize(("rule", "follow"), [("sqrt", False), ("linear", True), ("none", True)])
def test_nothing_but_the_rate_changes_where_nothing_follows(rule: str, follow: bool) -> None:
    optimizer = make(torch.optim.AdamW, lr=1e-3)
    before = {**group_of(optimizer)}
    scale_lr(optimizer, batch=256, base_batch=64, rule=rule, follow=follow)
    changed = {key for key, value in group_of(optimizer).items() if key != "params" and value != before.get(key)}
    assert changed - {"lr"} == {"scaled_from"}


def test_a_rate_that_is_a_tensor_is_changed_in_place() -> None:
    rate = torch.tensor(0.5)
    optimizer = make(torch.optim.SGD, lr=rate)
    scale_lr(optimizer, batch=64, base_batch=16)
    assert group_of(optimizer)["lr"] is rate
    assert rate.item() == 2.0
    assert group_of(optimizer)["scaled_from"] == 0.5


def test_two_groups_that_share_a_tensor_are_scaled_once() -> None:
    rate = torch.tensor(0.5)
    groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(2))]}]
    optimizer = torch.optim.SGD(groups, lr=rate)
    scale_lr(optimizer, batch=64, base_batch=16)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [2.0, 2.0]
    assert [group["scaled_from"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_betas_that_are_tensors_are_changed_in_place() -> None:
    betas = (torch.tensor(0.75), torch.tensor(0.875))
    optimizer = make(torch.optim.Adam, lr=torch.tensor(1e-3), betas=betas, capturable=True, foreach=False)
    scale_lr(optimizer, batch=64, base_batch=32, rule="sqrt")
    assert group_of(optimizer)["betas"][0] is betas[0]
    assert [beta.item() for beta in betas] == [0.5, 0.75]


@given(
    rate=st.floats(1e-6, 10.0),
    base_batch=st.integers(1, 10_000),
    growth=st.integers(1, 9),
    rule=st.sampled_from(["linear", "sqrt", "none"]),
)
def test_scaling_up_and_down_again_gives_back_every_hyperparameter(
    rate: float, base_batch: int, growth: int, rule: str
) -> None:
    optimizer = make(torch.optim.AdamW, lr=rate, weight_decay=0.05)
    before = {**group_of(optimizer)}
    scale_lr(optimizer, batch=base_batch * growth, base_batch=base_batch, rule=rule)
    del group_of(optimizer)["scaled_from"]
    scale_lr(optimizer, batch=base_batch, base_batch=base_batch * growth, rule=rule)
    for name in ("lr", "betas", "eps", "weight_decay"):
        assert group_of(optimizer)[name] == pytest.approx(before[name], rel=1e-9)


@given(first=st.integers(1, 64), second=st.integers(1, 64), rule=st.sampled_from(["linear", "sqrt"]))
def test_a_product_that_is_meant_is_one_scaling_by_the_product(first: int, second: int, rule: str) -> None:
    twice, once = make(torch.optim.SGD, lr=0.1), make(torch.optim.SGD, lr=0.1)
    scale_lr(twice, batch=first, base_batch=1, rule=rule)
    for group in twice.param_groups:
        group.pop("scaled_from", None)
    scale_lr(twice, batch=second, base_batch=1, rule=rule)
    scale_lr(once, batch=first * second, base_batch=1, rule=rule)
    assert group_of(twice)["lr"] == pytest.approx(group_of(once)["lr"], rel=1e-12)


def test_the_result_names_every_change() -> None:
    optimizer = make(torch.optim.RMSprop, lr=0.25, alpha=0.75, eps=0.5)
    scaled = scale_lr(optimizer, batch=8, base_batch=2, rule="sqrt")
    expected = (Change("lr", 0.25, 0.5), Change("alpha", 0.75, 0.0), Change("eps", 0.5, 0.25))
    assert scaled == Scaled("sqrt", 2, 8, 4.0, (expected,))


def test_the_result_reads_as_a_line() -> None:
    scaled = scale_lr(make(torch.optim.SGD, lr=0.1), batch=1024, base_batch=64)
    assert str(scaled) == "linear rule, batch 64 → 1024 (×16): lr 0.1 → 1.6"


def test_groups_that_differ_are_told_apart() -> None:
    scaled = scale_lr(two_groups(), batch=1024, base_batch=64)
    assert str(scaled) == "linear rule, batch 64 → 1024 (×16): group 0: lr 0.1 → 1.6; group 1: lr 0.01 → 0.16"


def test_no_rule_says_that_nothing_changed() -> None:
    scaled = scale_lr(two_groups(), batch=1024, base_batch=64, rule="none")
    assert str(scaled) == "none rule, batch 64 → 1024 (×16): nothing changed"


def reloaded(optimizer: Optimizer) -> Optimizer:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    fresh = make(type(optimizer), lr=7.0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


def test_the_old_rate_survives_a_checkpoint_and_a_scheduler() -> None:
    optimizer = make(torch.optim.SGD, lr=0.1)
    scale_lr(optimizer, batch=4, base_batch=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    optimizer.step()
    scheduler.step()
    assert group_of(reloaded(optimizer))["scaled_from"] == 0.1


def test_a_second_scaling_is_refused_even_after_a_checkpoint() -> None:
    optimizer = make(torch.optim.SGD, lr=0.1)
    scale_lr(optimizer, batch=4, base_batch=1)
    with pytest.raises(Misuse, match=r"scaled before \(parameter group 0: lr 0\.1 → 0\.4\).*pop\(\"scaled_from\""):
        scale_lr(reloaded(optimizer), batch=4, base_batch=1)


def test_scaling_after_the_scheduler_was_made_is_refused() -> None:
    optimizer = make(torch.optim.SGD, lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    with pytest.raises(Misuse, match="Call scale_lr first, then make the scheduler"):
        scale_lr(optimizer, batch=4, base_batch=1)


def test_a_refused_scaling_changes_no_group() -> None:
    optimizer = two_groups()
    optimizer.param_groups[1]["initial_lr"] = 0.01
    with pytest.raises(Misuse):
        scale_lr(optimizer, batch=4, base_batch=1)
    assert group_of(optimizer)["lr"] == 0.1
    assert "scaled_from" not in group_of(optimizer)


@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, True, "64", None])
@pytest.mark.parametrize("name", ["batch", "base_batch"])
def test_a_batch_that_is_no_count_is_refused(name: str, value: Any) -> None:
    sizes = {"batch": 64, "base_batch": 64, name: value}
    with pytest.raises(BadArgument, match=f"{name}=.* write a whole number of at least 1"):
        scale_lr(make(torch.optim.SGD, lr=0.1), **sizes)


@pytest.mark.parametrize("rule", ["cubic", "Linear", None, ["linear"]])
def test_a_rule_that_does_not_exist_is_refused_with_those_that_do(rule: Any) -> None:
    with pytest.raises(BadArgument, match="'linear', 'sqrt', 'none'"):
        scale_lr(make(torch.optim.SGD, lr=0.1), batch=2, base_batch=1, rule=rule)


def test_something_else_than_an_optimizer_is_refused() -> None:
    with pytest.raises(BadArgument, match="Linear is not an optimizer"):
        scale_lr(nn.Linear(1, 1), batch=2, base_batch=1)  # type: ignore[arg-type]


def test_an_optimizer_without_a_rate_is_refused() -> None:
    optimizer = make(torch.optim.SGD, lr=0.1)
    group_of(optimizer)["lr"] = None  # it finds its rate itself
    with pytest.raises(BadArgument, match="group 0 of SGD has no 'lr' that is a number"):
        scale_lr(optimizer, batch=2, base_batch=1)
    del group_of(optimizer)["lr"]
    with pytest.raises(BadArgument, match="group 0 of SGD has no 'lr'"):
        scale_lr(optimizer, batch=2, base_batch=1)


def walk(kind: Make, batch: int, rule: str, **options: Any) -> torch.Tensor:
    """Where 2,000 walkers are after 480 samples of a gradient of mean 0.1 and standard deviation 1."""
    walkers = nn.Parameter(torch.zeros(2000, dtype=torch.float64))
    optimizer = kind([walkers], **options)
    scale_lr(optimizer, batch=batch, base_batch=1, rule=rule)
    chance = torch.Generator().manual_seed(batch)
    for _ in range(480 // batch):
        noise = torch.randn(walkers.shape, dtype=walkers.dtype, generator=chance)
        walkers.grad = 0.1 + noise / math.sqrt(batch)
        optimizer.step()
    return walkers.detach()


@pytest.mark.parametrize(
    ("kind", "rule", "options"),
    [
        (torch.optim.SGD, "linear", {"lr": 1e-3}),
        (torch.optim.RMSprop, "sqrt", {"lr": 1e-3, "alpha": 0.99, "eps": 0.5}),
        (torch.optim.Adam, "sqrt", {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 0.5}),
    ],
)
def test_mean_and_spread_after_the_same_samples_stay(kind: Make, rule: str, options: dict[str, float]) -> None:
    small, large = walk(kind, 1, rule, **options), walk(kind, 4, rule, **options)
    assert large.mean().item() == pytest.approx(small.mean().item(), rel=0.04)
    assert large.std().item() == pytest.approx(small.std().item(), rel=0.08)


def test_the_page_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "scaling.md").read_text(encoding="utf-8")
    code, _, after = page.partition("```python\n")[2].partition("```")
    exec(code, {"optimizer": make(torch.optim.SGD, lr=0.1)})
    assert f"prints `{capsys.readouterr().out.strip()}`" in after
