"""Advice says where the batch stands, what growing costs, by which rule, how surely, or that it cannot."""

import json
import math
from typing import Any

import pytest

from lockstep.errors import BadArgument
from lockstep.optim.noise import Noise
from lockstep.optim.noise.advice import Advice, TooLittle, advise


def noise(critical: float = 4000, *, count: int = 100, width: float = 1.2, preconditioned: bool = False) -> Noise:
    return Noise(
        step=500,
        batch=64,
        count=count,
        left_out=0,
        effective=count,
        gradient_square=2.0,
        variance=2.0 * critical,
        low=critical / width,
        high=critical * width,
        preconditioned=preconditioned,
    )


def advised(batch: float, known: Noise | None = None, **options: Any) -> Advice:
    return advise(known or noise(), batch=batch, lanes=8, **options)


@pytest.mark.parametrize(
    ("batch", "position"), [(64, "below"), (2000, "below"), (2001, "near"), (4000, "near"), (4001, "beyond")]
)
def test_a_batch_is_below_while_doubling_it_stays_within_the_critical_batch(batch: float, position: str) -> None:
    assert advised(batch).position == position


def test_doubling_at_the_critical_batch_saves_a_quarter_of_the_steps_for_half_again_the_samples() -> None:
    growth = advised(4000).growths[0]
    assert (growth.factor, growth.steps, growth.samples) == (2, 0.75, 1.5)


def test_far_below_the_critical_batch_eight_times_the_workers_take_an_eighth_of_the_steps() -> None:
    growth = advised(4).growths[2]
    assert (growth.factor, growth.batch) == (8, 32)
    assert growth.steps == pytest.approx(1 / 8, rel=0.01)
    assert growth.samples == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(("optimizer", "rates"), [("sgd", [2, 4, 8]), ("adam", [2**0.5, 2, 8**0.5])])
def test_below_the_critical_batch_sgd_scales_linearly_and_adam_by_the_square_root(
    optimizer: str, rates: list[float]
) -> None:
    growths = advised(64, noise(preconditioned=optimizer == "adam"), optimizer=optimizer).growths
    assert [growth.rate for growth in growths] == pytest.approx(rates)


def test_no_rate_is_given_past_the_critical_batch() -> None:
    assert [growth.rate for growth in advised(1500, optimizer="sgd").growths] == [2, None, None]


def test_without_a_word_on_the_optimizer_no_rate_is_given_and_both_rules_are_told() -> None:
    advice = advised(64)
    assert [growth.rate for growth in advice.growths] == [None, None, None]
    assert "linear for SGD" in advice.text()


def test_beyond_the_critical_batch_the_advice_is_to_split_the_same_batch() -> None:
    text = advised(9000, optimizer="sgd").text()
    assert "Do not grow the batch" in text
    assert "split the same batch: up to 8" in text
    assert "Warm up" not in text


def test_below_the_critical_batch_the_advice_is_to_grow_with_a_warm_up() -> None:
    text = advised(64, optimizer="sgd").text()
    assert "Grow the batch with the workers, up to about 4,000" in text
    assert "over 5 epochs." in text


def test_the_warm_up_of_a_run_of_known_length_is_told_in_steps() -> None:
    advice = advised(64, steps=9000)
    assert advice.warm_up_steps == 500
    assert "or about 500 steps" in advice.text()


def test_the_text_says_how_sure_it_is() -> None:
    assert "95 % sure: 3,330 to 4,800, from 100 measurements" in advised(64).text()


def test_adam_with_only_the_plain_noise_known_is_told_so() -> None:
    assert "Only the plain noise scale is known" in advised(64, optimizer="adam").text()


def test_adam_with_the_preconditioned_noise_has_no_caveat() -> None:
    assert advised(64, noise(preconditioned=True), optimizer="adam").caveat is None


def test_sgd_is_not_advised_from_preconditioned_noise() -> None:
    with pytest.raises(BadArgument, match="give the plain one"):
        advised(64, noise(preconditioned=True), optimizer="sgd")


def test_json_carries_what_the_text_says() -> None:
    result = json.loads(advised(64, optimizer="sgd", steps=900).to_json())
    assert (result["critical_batch"], result["position"], result["warm_up_steps"]) == (4000, "below", 50)
    assert [growth["rate"] for growth in result["growths"]] == [2, 4, 8]


def test_too_few_measurements_are_refused_with_how_many_are_missing() -> None:
    with pytest.raises(TooLittle, match=r"from 12 measurements: 20 are needed\. Measure 8 more"):
        advised(64, noise(count=12))


def test_too_wide_an_interval_is_refused_with_how_many_measurements_narrow_it() -> None:
    with pytest.raises(TooLittle, match=r"from 1,000 to 16,000\. About 400 are needed, smoothed with a memory of 201"):
        advised(64, noise(width=4))


def test_an_interval_without_an_upper_end_is_refused() -> None:
    with pytest.raises(TooLittle, match="cannot be distinguished from its noise"):
        advised(64, _without_upper_end())


def _without_upper_end() -> Noise:
    return Noise(**{**vars(noise()), "high": math.inf})


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch": 0},
        {"batch": math.nan},
        {"lanes": 0},
        {"lanes": 2.5},
        {"steps": 0},
        {"steps": -3},
        {"optimizer": "lion"},
        {"noise": 4000.0},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    result: dict[str, Any] = {"noise": noise(), "batch": 64, "lanes": 8, **wrong}
    with pytest.raises(BadArgument):
        advise(result.pop("noise"), **result)
