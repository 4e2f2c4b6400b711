"""AdaScale's gain lies between none and linear, follows the noise, and makes a large batch worth many small ones."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import BadArgument
from lockstep.optim.adascale import AdaScale
from lockstep.optim.noise import Measured, measure

CURVATURE = torch.linspace(0.1, 1.0, 10, dtype=torch.float64)
NOISE = 1.5
BASE_BATCH = 4


def lanes_of_gradients(x: torch.Tensor, num_lanes: int, chance: torch.Generator) -> torch.Tensor:
    """One mean gradient of a base batch for each lane: that of a quadratic, plus noise of known variance."""
    noise = torch.randn(num_lanes, 10, dtype=torch.float64, generator=chance)
    return CURVATURE * x + noise * NOISE / math.sqrt(BASE_BATCH)


def measured_on(gradients: torch.Tensor) -> Measured:
    squares = dict(enumerate(gradients.square().sum(1).tolist()))
    return measure(squares, dict.fromkeys(squares, BASE_BATCH), float(gradients.mean(0).square().sum()))


def loss(x: torch.Tensor) -> float:
    return float((CURVATURE * x.square()).sum() / 2)


def mean_loss(base_steps: int, num_lanes: int, lr: float) -> float:
    """The mean loss of thirty runs of plain SGD on so many lanes."""
    x = torch.full((30, 10), 3.0, dtype=torch.float64)
    chance = torch.Generator().manual_seed(1)
    for _ in range(base_steps):
        x = x - lr * torch.stack([lanes_of_gradients(run, num_lanes, chance).mean(0) for run in x])
    return sum(map(loss, x)) / 30


def mean_loss_with_adascale(base_steps: int, lr: float) -> tuple[float, int]:
    """The same with eight lanes and AdaScale, after as many scale-invariant iterations, and the most steps it took."""
    losses, most = [], 0
    for seed in range(30):
        chance, scale = torch.Generator().manual_seed(seed), AdaScale(BASE_BATCH)
        x, steps = torch.full((10,), 3.0, dtype=torch.float64), 0
        while scale.iterations < base_steps:
            gradients = lanes_of_gradients(x, 8, chance)
            x = x - lr * scale.gain(8 * BASE_BATCH, measured_on(gradients)) * gradients.mean(0)
            steps += 1
        losses.append(loss(x))
        most = max(most, steps)
    return sum(losses) / 30, most


def test_the_gain_on_a_quadratic_is_that_of_the_papers_equation() -> None:
    x, lanes, chance = torch.linspace(-1, 1, 10, dtype=torch.float64), 8, torch.Generator().manual_seed(0)
    scale = AdaScale(BASE_BATCH, smoothing=0.999)
    for _ in range(3000):
        gain = scale.gain(lanes * BASE_BATCH, measured_on(lanes_of_gradients(x, lanes, chance)))
    mu, sigma = float((CURVATURE * x).square().sum()), 10 * NOISE**2 / BASE_BATCH
    assert gain == pytest.approx((sigma + mu) / (sigma / lanes + mu), rel=0.02)


def test_eight_lanes_reach_the_loss_of_one_in_as_many_scale_invariant_iterations_and_fewer_steps() -> None:
    reached, steps = mean_loss_with_adascale(200, lr=0.02)
    assert reached == pytest.approx(mean_loss(200, 1, lr=0.02), rel=0.15)
    assert steps < 200


def test_where_the_linear_rule_diverges_adascale_does_no_worse_than_one_lane() -> None:
    reached, steps = mean_loss_with_adascale(40, lr=0.3)
    assert reached <= mean_loss(40, 1, lr=0.3)
    assert steps < 40
    assert mean_loss(40 // 8, 8, lr=8 * 0.3) > 10


@given(st.floats(-10, 10), st.floats(-10, 10), st.floats(1, 4096))
def test_the_gain_lies_between_1_and_the_growth_of_the_batch(square: float, variance: float, growth: float) -> None:
    assert 1 <= AdaScale(16).gain(16 * growth, Measured(square, variance)) <= growth


@pytest.mark.parametrize(("measured", "gain"), [(Measured(0.0, 1.0), 8), (Measured(1.0, 0.0), 1), (Measured(0, 0), 1)])
def test_all_noise_gives_the_linear_rule_and_none_gives_no_gain(measured: Measured, gain: float) -> None:
    assert AdaScale(4).gain(32, measured) == gain


def test_a_batch_smaller_than_the_base_is_worth_less_than_a_step() -> None:
    assert AdaScale(4).gain(2, Measured(0.0, 1.0)) == 0.5


def test_the_moving_average_forgets_by_the_papers_factor() -> None:
    scale = AdaScale(1)
    scale.gain(100, Measured(1.0, 0.0))
    scale.gain(100, Measured(0.0, 0.0))
    assert scale.gradient_square == pytest.approx(0.9 / 1.9, rel=1e-12)


def test_iterations_are_the_sum_of_the_gains() -> None:
    scale = AdaScale(4)
    gains = [scale.gain(32, Measured(1.0, variance)) for variance in (1.0, 5.0, 2.0)]
    assert scale.iterations == pytest.approx(sum(gains), rel=1e-12)


def test_a_measurement_that_is_not_finite_leaves_the_averages_alone() -> None:
    scale = AdaScale(4)
    before = scale.gain(32, Measured(1.0, 9.0))
    assert scale.gain(32, Measured(math.nan, 9.0)) == before
    assert scale.count == 1


def test_a_state_through_json_goes_on_with_the_same_numbers() -> None:
    first, second = AdaScale(4, smoothing=0.8), AdaScale(99)
    first.gain(32, Measured(1.1, 9.3))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first.gain(32, Measured(0.7, 3.3)) == second.gain(32, Measured(0.7, 3.3))
    assert first.state_dict() == second.state_dict()


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(BadArgument, match="not the state of an AdaScale"):
        AdaScale(4).load_state_dict({"count": 3})


@pytest.mark.parametrize("batch", [0, -1, math.nan, math.inf, "4", None])
def test_a_base_batch_that_is_no_number_of_samples_is_refused(batch: object) -> None:
    with pytest.raises(BadArgument, match="base_batch"):
        AdaScale(batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("smoothing", [1.0, -0.1, math.nan, "0.9"])
def test_a_smoothing_that_never_forgets_is_refused(smoothing: object) -> None:
    with pytest.raises(BadArgument, match="smoothing"):
        AdaScale(4, smoothing=smoothing)  # type: ignore[arg-type]
