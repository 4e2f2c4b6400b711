"""Warm-up: the values of every step, alone and with torch's own schedulers."""

import copy
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from lockstep.errors import BadArgument
from lockstep.optim.rules import scale_lr
from lockstep.optim.warmup import WarmUp


@pytest.fixture(autouse=True)
def torch_warns_of_nothing() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def sgd(lr: Any = 0.8, scaled_from: int | None = None) -> Optimizer:
    """An optimizer with rate `lr`; with `scaled_from`, its batch was grown by 8 from that batch."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=lr)
    if scaled_from:
        scale_lr(optimizer, batch=8 * scaled_from, base_batch=scaled_from)
    return optimizer


def rates(optimizer: Optimizer, scheduler: LRScheduler, num_steps: int) -> list[float]:
    """The rate that each step used."""
    used = []
    for _ in range(num_steps):
        used.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return used


def test_a_scaled_rate_rises_from_the_base_rate_by_equal_amounts() -> None:
    optimizer = sgd(0.5, scaled_from=32)
    used = rates(optimizer, WarmUp(optimizer, steps=7), 9)
    assert used == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.0]


def test_an_exponential_warm_up_rises_by_equal_factors() -> None:
    optimizer = sgd(0.5, scaled_from=32)
    used = rates(optimizer, WarmUp(optimizer, steps=3, shape="exponential"), 5)
    assert used == pytest.approx([0.5, 1.0, 2.0, 4.0, 4.0], rel=1e-14)


def test_start_is_a_share_of_the_full_rate() -> None:
    optimizer = sgd(1.0)
    assert rates(optimizer, WarmUp(optimizer, steps=3, start=0.25), 5) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_linear_warm_up_may_rise_from_zero() -> None:
    optimizer = sgd(1.0)
    assert rates(optimizer, WarmUp(optimizer, steps=4, start=0), 6) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_rate_that_was_scaled_down_stays_where_it_is() -> None:
    optimizer = sgd(0.8)
    scale_lr(optimizer, batch=1, base_batch=4)
    assert rates(optimizer, WarmUp(optimizer, steps=3), 5) == [0.2] * 5


def test_a_group_whose_rate_is_zero_stays_at_zero() -> None:
    optimizer = sgd(0.0, scaled_from=32)
    assert rates(optimizer, WarmUp(optimizer, steps=3, shape="exponential"), 5) == [0.0] * 5


def test_epochs_are_counted_in_steps() -> None:
    assert WarmUp(sgd(), epochs=5, steps_per_epoch=100, start=0.1).steps == 500


def test_a_part_of_an_epoch_is_rounded_to_whole_steps() -> None:
    assert WarmUp(sgd(), epochs=0.29, steps_per_epoch=100, start=0.1).steps == 29


@given(
    full=st.floats(1e-5, 50.0),
    start=st.floats(0.001, 1.0),
    steps=st.integers(1, 60),
    shape=st.sampled_from(["linear", "exponential"]),
)
def test_every_rate_comes_from_the_formula_and_the_last_is_the_full_rate_bit_for_bit(
    full: float, start: float, steps: int, shape: str
) -> None:
    optimizer = sgd(full)
    used = rates(optimizer, WarmUp(optimizer, steps=steps, start=start, shape=shape), steps + 2)
    low = start * full
    for step, rate in enumerate(used[:steps]):
        part = step / steps
        assert rate == (low + (full - low) * part if shape == "linear" else low ** (1 - part) * full**part)
    assert used[steps:] == [full, full]


@given(base=st.floats(1e-6, 10.0), growth=st.integers(1, 1000))
def test_the_first_step_has_the_base_rate_bit_for_bit(base: float, growth: int) -> None:
    optimizer = sgd(base)
    scale_lr(optimizer, batch=growth, base_batch=1)
    assert rates(optimizer, WarmUp(optimizer, steps=10), 1) == [base]


def test_every_group_has_its_own_rise() -> None:
    optimizer = sgd(0.5)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.25})
    scale_lr(optimizer, batch=3, base_batch=1)
    scheduler = WarmUp(optimizer, steps=2)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0, 0.5]


@pytest.mark.parametrize("shape", ["linear", "exponential"])
def test_a_rate_that_is_a_tensor_rises_in_place(shape: str) -> None:
    rate = torch.tensor(0.5)
    optimizer = sgd(rate, scaled_from=32)
    used = rates(optimizer, WarmUp(optimizer, steps=3, shape=shape), 5)
    middle = [0.5 + 3.5 / 3, 0.5 + 7.0 / 3] if shape == "linear" else [1.0, 2.0]
    assert used == pytest.approx([0.5, *middle, 4.0, 4.0], rel=1e-6)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 4.0


@pytest.mark.parametrize("shape", ["linear", "exponential"])
def test_the_closed_form_is_what_the_steps_give(shape: str) -> None:
    optimizer = sgd(0.7)
    scheduler = WarmUp(optimizer, steps=5, start=0.3, shape=shape)
    for _ in range(8):
        assert scheduler._get_closed_form_lr() == scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()


def test_asking_torchs_own_method_from_outside_warns() -> None:
    scheduler = WarmUp(sgd(), steps=3, start=0.1)
    with pytest.warns(UserWarning, match="get_last_lr"):
        scheduler.get_lr()


Later = Callable[[Optimizer], LRScheduler]
AFTER: dict[str, tuple[Later, Callable[[int], float]]] = {
    "cosine": (
        lambda optimizer: CosineAnnealingLR(optimizer, T_max=6, eta_min=0.1),
        lambda step: 0.1 + (0.8 - 0.1) * (1 + math.cos(math.pi * step / 6)) / 2,
    ),
    "step": (lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5), lambda step: 0.8 * 0.5 ** (step // 2)),
    "poly": (
        lambda optimizer: PolynomialLR(optimizer, total_iters=6, power=2.0),
        lambda step: 0.8 * (1 - step / 6) ** 2,
    ),
    "lambda": (lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)), lambda step: 0.8 / (1 + step)),
}


@pytest.mark.parametrize("name", AFTER)
def test_another_schedule_follows_the_warm_up(name: str) -> None:
    later, expected = AFTER[name]
    optimizer = sgd(0.1, scaled_from=32)
    both = SequentialLR(optimizer, [WarmUp(optimizer, steps=7), later(optimizer)], milestones=[7])
    used = rates(optimizer, both, 7 + 6)
    assert used[:7] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert used[7:] == pytest.approx([expected(step) for step in range(6)])


@pytest.mark.parametrize("name", AFTER)
def test_the_schedule_that_follows_may_be_made_first(name: str) -> None:
    later, _ = AFTER[name]
    first, second = sgd(0.1, scaled_from=32), sgd(0.1, scaled_from=32)
    warm_up = WarmUp(first, steps=7)
    one = SequentialLR(first, [warm_up, later(first)], milestones=[7])
    made_first = later(second)
    other = SequentialLR(second, [WarmUp(second, steps=7), made_first], milestones=[7])
    assert rates(first, one, 13) == rates(second, other, 13)


def test_a_warm_up_may_come_again_later() -> None:
    optimizer = sgd(1.0)
    phases = [WarmUp(optimizer, steps=2, start=0.5), WarmUp(optimizer, steps=2, start=0.25)]
    both = SequentialLR(optimizer, phases, milestones=[3])
    assert rates(optimizer, both, 7) == [0.5, 0.75, 1.0, 0.25, 0.625, 1.0, 1.0]


CHAINED = ["cosine", "step", "poly"]  # LambdaLR overwrites what it finds, in torch too


@pytest.mark.parametrize("start", [0.125, 0])
@pytest.mark.parametrize("name", CHAINED)
def test_chained_with_another_schedule_the_two_factors_multiply(name: str, start: float) -> None:
    later, alone = AFTER[name]
    optimizer = sgd(0.8)
    warm_up = WarmUp(optimizer, steps=4, start=start)
    # A cosine with a floor is no factor, so its floor is taken away here.
    other = CosineAnnealingLR(optimizer, T_max=6) if name == "cosine" else later(optimizer)
    factor = (lambda step: 0.4 * (1 + math.cos(math.pi * step / 6))) if name == "cosine" else alone
    used = rates(optimizer, ChainedScheduler([warm_up, other], optimizer=optimizer), 6)
    share = [min(1.0, start + (1 - start) * step / 4) for step in range(6)]
    assert used == pytest.approx([share[step] * factor(step) for step in range(6)])


@pytest.mark.parametrize("name", CHAINED)
def test_from_above_zero_a_warm_up_may_stand_last_in_a_chain(name: str) -> None:
    first, second = sgd(0.8), sgd(0.8)
    schedule = {"cosine": lambda one: CosineAnnealingLR(one, T_max=6)}.get(name, AFTER[name][0])
    one = ChainedScheduler([WarmUp(first, steps=4, start=0.1), schedule(first)])
    other = ChainedScheduler([schedule(second), WarmUp(second, steps=4, start=0.1)])
    assert rates(first, one, 6) == pytest.approx(rates(second, other, 6))


def chained_with_a_tensor(start: float) -> list[float]:
    optimizer = sgd(torch.tensor(0.8))
    warm_up = WarmUp(optimizer, steps=4, start=start)
    return rates(optimizer, ChainedScheduler([warm_up, StepLR(optimizer, step_size=2, gamma=0.5)]), 6)


@pytest.mark.parametrize("start", [0.2, 0])
def test_a_tensor_in_a_chain_has_the_same_rates_to_rounding(start: float) -> None:
    optimizer = sgd(0.8)
    warm_up = WarmUp(optimizer, steps=4, start=start)
    plain = rates(optimizer, ChainedScheduler([warm_up, StepLR(optimizer, step_size=2, gamma=0.5)]), 6)
    assert chained_with_a_tensor(start) == pytest.approx(plain, rel=1e-6)


@given(full=st.floats(1e-5, 50.0), by_hand=st.floats(1e-5, 50.0))
def test_after_the_warm_up_a_rate_that_others_set_stays_bit_for_bit(full: float, by_hand: float) -> None:
    optimizer = sgd(full)
    scheduler = WarmUp(optimizer, steps=2, start=0.5)
    rates(optimizer, scheduler, 2)
    optimizer.param_groups[0]["lr"] = by_hand
    assert rates(optimizer, scheduler, 3) == [by_hand] * 3


@pytest.mark.parametrize("full", [1.0, torch.tensor(1.0)])
def test_a_rate_set_by_hand_where_the_warm_up_is_at_zero_is_replaced(full: Any) -> None:
    optimizer = sgd(copy.deepcopy(full))
    scheduler = WarmUp(optimizer, steps=4, start=0)
    optimizer.param_groups[0]["lr"] = copy.deepcopy(full) / 2
    assert rates(optimizer, scheduler, 4) == [0.5, 0.25, 0.5, 0.75]


def with_cosine(optimizer: Optimizer) -> LRScheduler:
    warm_up = WarmUp(optimizer, steps=5)
    return SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, T_max=5)], milestones=[5])


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("stop", [0, 1, 3, 5, 7])
@pytest.mark.parametrize("make", [lambda optimizer: WarmUp(optimizer, steps=5), with_cosine])
def test_a_resumed_warm_up_goes_on_with_the_same_bits(make: Later, stop: int) -> None:
    whole, first, second = (sgd(0.1, scaled_from=32) for _ in range(3))
    expected = rates(whole, make(whole), 10)
    before = make(first)
    used = rates(first, before, stop)
    after = make(second)
    second.load_state_dict(through_a_file(first.state_dict()))
    after.load_state_dict(through_a_file(before.state_dict()))
    assert used + rates(second, after, 10 - stop) == expected


def test_a_warm_up_may_resume_by_torchs_last_epoch() -> None:
    whole, first = sgd(0.1, scaled_from=32), sgd(0.1, scaled_from=32)
    expected = rates(whole, WarmUp(whole, steps=5), 8)
    rates(first, WarmUp(first, steps=5), 3)
    second = sgd(7.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert rates(second, WarmUp(second, steps=5, last_epoch=2), 5) == expected[3:]


def test_without_a_scaled_rate_start_must_be_given() -> None:
    with pytest.raises(BadArgument, match=r"group 0 was not scaled by scale_lr.*write start=0\.1"):
        WarmUp(sgd(), steps=5)


def test_a_group_that_came_after_the_scaling_is_named() -> None:
    optimizer = sgd(0.1, scaled_from=32)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(BadArgument, match="group 1 was not scaled"):
        WarmUp(optimizer, steps=5)


LENGTH = "steps=500, or epochs=5, steps_per_epoch=100"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, LENGTH),
        ({"epochs": 5}, LENGTH),
        ({"steps_per_epoch": 5}, LENGTH),
        ({"steps": 5, "epochs": 5, "steps_per_epoch": 5}, LENGTH),
        ({"steps": 5, "steps_per_epoch": 5}, LENGTH),
        ({"steps": 0}, "steps=0 cannot be used; write a whole number"),
        ({"steps": -3}, "steps=-3 cannot"),
        ({"steps": 2.5}, "steps=2.5 cannot"),
        ({"steps": True}, "steps=True cannot"),
        ({"epochs": 0, "steps_per_epoch": 5}, "epochs=0 cannot be used; write a number above 0"),
        ({"epochs": math.nan, "steps_per_epoch": 5}, "epochs=nan cannot"),
        ({"epochs": math.inf, "steps_per_epoch": 5}, "epochs=inf cannot"),
        ({"epochs": "5", "steps_per_epoch": 5}, "epochs='5' cannot"),
        ({"epochs": 5, "steps_per_epoch": 0}, "steps_per_epoch=0 cannot"),
        ({"epochs": 0.01, "steps_per_epoch": 5}, "less than one step"),
        ({"steps": 5, "start": -0.1}, "start=-0.1 cannot be used; write a share of the full rate from 0 to 1"),
        ({"steps": 5, "start": 1.1}, "start=1.1 cannot"),
        ({"steps": 5, "start": math.nan}, "start=nan cannot"),
        ({"steps": 5, "start": "0.1"}, "start='0.1' cannot"),
        ({"steps": 5, "start": 0, "shape": "exponential"}, "cannot rise from start=0"),
        ({"steps": 5, "shape": "cosine"}, "write one of 'linear', 'exponential'"),
    ],
)
def test_nonsense_is_refused_with_what_to_write(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadArgument) as refusal:
        WarmUp(sgd(), **{"start": 0.1, **options})
    assert sentence in str(refusal.value)


def test_something_else_than_an_optimizer_is_refused() -> None:
    with pytest.raises(BadArgument, match="Linear is not an optimizer"):
        WarmUp(nn.Linear(1, 1), steps=5, start=0.1)  # type: ignore[arg-type]


PAGE = Path(__file__).parent.parent.parent / "docs" / "scaling.md"


def documented(heading: str) -> str:
    """The code that the page gives under a heading."""
    section = PAGE.read_text(encoding="utf-8").partition(f"# {heading}\n")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found, heading
    return found[1]


FULL = 1.6
DOCUMENTED: dict[str, Callable[[int], float]] = {  # 90 epochs of 2 steps; the warm-up has 10
    "Cosine": lambda step: FULL * (1 + math.cos(math.pi * (step - 10) / 170)) / 2,
    "Polynomial": lambda step: FULL * (1 - (step - 10) / 170) ** 2,
    "Step": lambda step: FULL * 0.1 ** sum(step >= 2 * epoch for epoch in (30, 60, 80)),
    "Both at once": lambda step: FULL * (1 + math.cos(math.pi * step / 180)) / 2,
}


@pytest.mark.parametrize("heading", DOCUMENTED)
def test_the_schedules_of_the_page_do_what_it_says(heading: str) -> None:
    optimizer = sgd(0.1)
    scale_lr(optimizer, batch=1024, base_batch=64)
    names: dict[str, Any] = {"optimizer": optimizer, "loader": range(2), "epochs": 90}
    exec(documented(heading), names)
    warm = [0.1 + 1.5 * step / 10 for step in range(10)]
    if heading == "Both at once":
        warm = [rate * DOCUMENTED[heading](step) / FULL for step, rate in enumerate(warm)]
    expected = warm + [DOCUMENTED[heading](step) for step in range(10, 180)]
    assert rates(optimizer, names["scheduler"], 180) == pytest.approx(expected, abs=1e-12)


def test_the_warm_up_of_the_page_lasts_five_epochs() -> None:
    names: dict[str, Any] = {"optimizer": sgd(0.1), "loader": range(2)}
    exec(documented("Warm-up"), names)
    assert rates(names["optimizer"], names["scheduler"], 12)[9:] == pytest.approx([1.45, 1.6, 1.6])
