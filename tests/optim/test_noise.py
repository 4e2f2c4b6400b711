"""The noise of a gradient is measured without bias, smoothed, and told with an interval."""

import json
import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import BadArgument
from lockstep.optim.lamb import LAMB
from lockstep.optim.noise import Measured, Noise, NoiseScale, measure
from lockstep.optim.noise.preconditioner import PIECE, Preconditioners, preconditioner, weighted_square

HESSIAN = torch.diag(torch.linspace(0.2, 3.0, 12, dtype=torch.float64))
POINT = torch.linspace(-1, 1, 12, dtype=torch.float64)
MIXING = torch.linspace(0.5, 4.0, 12, dtype=torch.float64).diag() + 0.3  # noise = MIXING·z, so Σ = MIXING·MIXINGᵀ
TRUE_GRADIENT = HESSIAN @ POINT
COVARIANCE = MIXING @ MIXING.T
P = torch.logspace(-2, 2, 12, dtype=torch.float64)
EVEN = tuple((lane, 8) for lane in range(8))
UNEVEN = ((0, 1), (1, 3), (2, 20), (3, 7), (4, 0), (5, 33))
Lanes = tuple[tuple[int, int], ...]

squares = st.floats(0, 1e6)


@cache
def measured_steps(lanes: Lanes, p: Tensor | None = None) -> list[Measured]:
    """10,000 steps on a quadratic: a sample's gradient is Hx plus noise of known covariance; lanes hold their means."""
    weights, chance = dict(lanes), torch.Generator().manual_seed(0)
    noise = torch.randn(10_000, sum(weights.values()), 12, dtype=torch.float64, generator=chance)
    samples = TRUE_GRADIENT + noise @ MIXING.T

    def squares_of(gradients: Tensor) -> list[float]:
        values: list[float] = gradients.square().mul(1 if p is None else p).sum(1).tolist()
        return values

    shares = dict(zip(weights, samples.split(list(weights.values()), dim=1), strict=True))
    of_lane = {v: squares_of(share.sum(1) / max(weights[v], 1)) for v, share in shares.items()}
    return [
        measure({v: of_step[k] for v, of_step in of_lane.items()}, weights, whole)
        for k, whole in enumerate(squares_of(samples.mean(1)))
    ]


def smoothed(measurements: list[Measured], batch: float = 64, memory: float = 1e9) -> Noise:
    scale = NoiseScale(memory=memory)
    for step, measured in enumerate(measurements):
        scale.add(step, batch, measured)
    return scale.noise


@pytest.mark.parametrize("weights", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_the_noise_scale_of_a_quadratic_is_found_within_5_percent(weights: Lanes) -> None:
    truth = COVARIANCE.trace() / TRUE_GRADIENT.square().sum()
    assert smoothed(measured_steps(weights)).simple == pytest.approx(float(truth), rel=0.05)


@pytest.mark.parametrize("weights", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_the_preconditioned_noise_scale_is_found_within_5_percent(weights: Lanes) -> None:
    truth = (P * COVARIANCE.diag()).sum() / (P * TRUE_GRADIENT.square()).sum()
    assert smoothed(measured_steps(weights, P)).simple == pytest.approx(float(truth), rel=0.05)


@pytest.mark.parametrize("weights", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("quantity", ["gradient_square", "variance"])
def test_a_single_measurement_has_no_bias(weights: Lanes, quantity: str) -> None:
    truth = {"gradient_square": TRUE_GRADIENT.square().sum(), "variance": COVARIANCE.trace()}[quantity]
    values = torch.tensor([getattr(one, quantity) for one in measured_steps(weights)])
    assert abs(values.mean() - truth) < 4 * values.std() / math.sqrt(len(values))


@given(st.integers(2, 16), st.integers(1, 100), st.lists(squares, min_size=16, max_size=16), squares)
def test_even_lanes_give_the_two_batch_formula_of_the_paper(
    num_lanes: int, small: int, lane_squares: list[float], whole: float
) -> None:
    measured = measure(dict(enumerate(lane_squares[:num_lanes])), dict.fromkeys(range(num_lanes), small), whole)
    big, mean = small * num_lanes, sum(lane_squares[:num_lanes]) / num_lanes
    rough = {"rel": 1e-9, "abs": 1e-6 * big}
    assert measured.gradient_square == pytest.approx((big * whole - small * mean) / (big - small), **rough)
    assert measured.variance == pytest.approx((mean - whole) / (1 / small - 1 / big), **rough)


@given(st.dictionaries(st.integers(0, 9), st.tuples(squares, st.integers(1, 50)), min_size=2), squares)
def test_an_empty_lane_changes_nothing(lanes: dict[int, tuple[float, int]], whole: float) -> None:
    lane_squares = {v: square for v, (square, _) in lanes.items()}
    weights = {v: weight for v, (_, weight) in lanes.items()}
    assert measure({**lane_squares, 77: 5.0}, {**weights, 77: 0}, whole) == measure(lane_squares, weights, whole)


@given(st.dictionaries(st.integers(0, 9), st.tuples(squares, st.integers(1, 50)), min_size=2), squares)
def test_the_order_in_which_lanes_are_told_changes_no_bit(lanes: dict[int, tuple[float, int]], whole: float) -> None:
    there, back = list(lanes.items()), list(reversed(lanes.items()))
    first, second = (
        measure({v: square for v, (square, _) in result}, {v: weight for v, (_, weight) in result}, whole)
        for result in (there, back)
    )
    assert first == second


@pytest.mark.parametrize(
    ("lane_squares", "weights", "whole", "words"),
    [
        ({0: 1.0}, {0: 4}, 1.0, "two lanes"),
        ({0: 1.0, 1: 1.0}, {0: 4, 1: 0}, 1.0, "two lanes"),
        ({0: 1.0, 1: 1.0}, {0: 4, 1: -4}, 1.0, "weight of lane 1"),
        ({0: 1.0, 1: 1.0}, {0: 4, 1: math.nan}, 1.0, "weight of lane 1"),
        ({0: 1.0, 2: 1.0}, {0: 4, 1: 4}, 1.0, r"lanes \[1, 2\]"),
        ({0: 1.0, 1: -1.0}, {0: 4, 1: 4}, 1.0, "square of lane 1"),
        ({0: 1.0, 1: 1.0}, {0: 4, 1: 4}, -1.0, "whole gradient"),
        ({0: 1.0, 1: 1.0}, {0: 4, 1: 4}, "1", "whole gradient"),
    ],
)
def test_what_cannot_be_measured_is_refused(lane_squares: object, weights: object, whole: object, words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        measure(lane_squares, weights, whole)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=1, max_size=30), st.floats(2, 50))
def test_smoothing_is_the_exponentially_weighted_mean(pairs: list[tuple[float, float]], memory: float) -> None:
    noise = smoothed([Measured(*pair) for pair in pairs], memory=memory)
    weights = [(1 - 1 / memory) ** age for age in reversed(range(len(pairs)))]
    means = [sum(w * pair[i] for w, pair in zip(weights, pairs, strict=True)) / sum(weights) for i in (0, 1)]
    assert [noise.gradient_square, noise.variance] == pytest.approx(means, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
def test_a_measurement_that_is_not_finite_is_left_out_and_counted(bad: float) -> None:
    good = measured_steps(EVEN)[:30]
    with_bad = smoothed([*good[:10], Measured(bad, 1.0), *good[10:20], Measured(1.0, bad), *good[20:]])
    without = smoothed(good)
    assert (with_bad.count, with_bad.left_out) == (30, 2)
    assert (with_bad.simple, with_bad.low, with_bad.high) == (without.simple, without.low, without.high)


def test_a_nan_gradient_gives_a_measurement_that_is_left_out() -> None:
    assert smoothed([measure({0: math.nan, 1: 1.0}, {0: 1, 1: 1}, math.nan)]).left_out == 1


def test_a_skipped_step_is_counted_and_smooths_nothing() -> None:
    scale = NoiseScale()
    scale.skip(3)
    assert (scale.noise.step, scale.noise.count, scale.noise.left_out) == (3, 0, 1)


def test_before_any_measurement_nothing_is_claimed() -> None:
    noise = NoiseScale().noise
    assert (noise.count, noise.simple, noise.low, noise.high, noise.sure) == (0, math.inf, 0.0, math.inf, False)


@pytest.mark.parametrize("memory", [1e9, 20], ids=["plain mean", "exponential"])
def test_about_95_of_100_intervals_hold_the_truth(memory: float) -> None:
    truth, steps = float(COVARIANCE.trace() / TRUE_GRADIENT.square().sum()), measured_steps(EVEN)
    intervals = [smoothed(steps[first : first + 50], memory=memory) for first in range(0, 10_000, 50)]
    assert 0.90 <= sum(noise.low <= truth <= noise.high for noise in intervals) / len(intervals) <= 0.99


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=2, max_size=40))
def test_the_interval_encloses_the_noise_scale(pairs: list[tuple[float, float]]) -> None:
    noise = smoothed([Measured(*pair) for pair in pairs])
    assume(noise.gradient_square > 1e-3)
    assert noise.low <= noise.simple * (1 + 1e-6) + 1e-9
    assert noise.simple <= noise.high * (1 + 1e-6) + 1e-9


def test_two_series_that_move_together_leave_no_doubt_about_their_ratio() -> None:
    noise = smoothed([Measured(g, 3 * g) for g in (1.0, 2.0, 1.5, 0.5, 1.2)])
    assert (noise.low, noise.high) == pytest.approx((3, 3), rel=1e-6)


def test_an_interval_has_no_upper_end_where_the_gradient_is_lost_in_noise() -> None:
    noise = smoothed([Measured((-1.0) ** step + 0.01, 100.0 + step % 3) for step in range(40)])
    assert noise.high == math.inf
    assert 0 < noise.low < noise.simple
    assert not noise.sure


def test_a_gradient_square_that_is_not_positive_has_an_infinite_noise_scale() -> None:
    assert smoothed([Measured(-1.0, 5.0)] * 3).simple == math.inf


def test_nineteen_measurements_are_too_few_to_be_sure_of() -> None:
    assert not smoothed([Measured(1.0, 100.0)] * 19).sure
    assert smoothed([Measured(1.0, 100.0)] * 20).sure


def test_a_state_through_json_goes_on_with_the_same_numbers() -> None:
    steps = measured_steps(UNEVEN)[:60]
    whole, first, second = NoiseScale(memory=30), NoiseScale(memory=30), NoiseScale()
    for step, measured in enumerate(steps):
        whole.add(step, 64, measured)
        (first if step < 25 else second).add(step, 64, measured)
        if step == 24:
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.noise == whole.noise
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize("change", [{"weight": math.nan}, {"count": "3"}, {"other": 1}, {"preconditioned": True}])
def test_a_state_that_is_none_of_this_kind_is_refused(change: dict[str, object]) -> None:
    state: dict[str, object] = {**NoiseScale().state_dict(), **change}
    with pytest.raises(BadArgument):
        NoiseScale().load_state_dict(state)  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", [0, 1, -5, math.nan, math.inf, "100", True])
def test_a_memory_that_is_no_number_of_measurements_is_refused(memory: object) -> None:
    with pytest.raises(BadArgument, match="memory"):
        NoiseScale(memory=memory)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [4, 5, -1, 6.0, "6"])
def test_a_step_is_measured_once_and_in_order(step: object) -> None:
    scale = NoiseScale()
    scale.add(5, 64, Measured(1.0, 1.0))
    with pytest.raises(BadArgument, match="above 5"):
        scale.add(step, 64, Measured(1.0, 1.0))  # type: ignore[arg-type]


def adam_like(kind: type[Optimizer], **options: object) -> Callable[[list[nn.Parameter]], Optimizer]:
    return lambda parameters: kind(parameters, lr=0.01, **options)  # type: ignore[call-arg]


NO_MOMENTUM = (0.0, 0.9)
OPTIMIZERS = {
    "adam": adam_like(torch.optim.Adam, betas=NO_MOMENTUM),
    "amsgrad": adam_like(torch.optim.Adam, betas=NO_MOMENTUM, amsgrad=True),
    "adamw": adam_like(torch.optim.AdamW, betas=NO_MOMENTUM, weight_decay=0.0),
    "nadam": adam_like(torch.optim.NAdam, betas=NO_MOMENTUM),
    "adamax": adam_like(torch.optim.Adamax, betas=NO_MOMENTUM),
    "rmsprop": adam_like(torch.optim.RMSprop, alpha=0.9),
    "centred rmsprop": adam_like(torch.optim.RMSprop, alpha=0.9, centered=True),
    "fused adam": adam_like(torch.optim.Adam, betas=NO_MOMENTUM, fused=True),
}


def one_more_step(make: Callable[[list[nn.Parameter]], Optimizer], num_before: int) -> tuple[Tensor, Tensor, Tensor]:
    """The last gradient, the parameter's last move, and the p of the state that made it."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    optimizer = make([parameter])
    for _ in range(num_before + 1):
        parameter.grad = torch.randn(5, 3, dtype=torch.float64) * torch.logspace(-3, 3, 3, dtype=torch.float64)
        before = parameter.detach().clone()
        optimizer.step()
    p = preconditioner(optimizer, parameter)
    assert parameter.grad is not None
    assert p is not None
    return parameter.grad, parameter.detach() - before, p


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_before", [0, 7])
def test_without_momentum_the_update_is_the_rate_times_p_times_the_gradient(name: str, num_before: int) -> None:
    if name == "centred rmsprop" and num_before == 0:
        num_before = 1  # of a single gradient the variance is nearly 0, and all that is left is rounding
    gradient, move, p = one_more_step(OPTIMIZERS[name], num_before)
    torch.testing.assert_close(move, -0.01 * p * gradient, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("num_before", [0, 40])
def test_radam_moves_along_p_times_the_gradient_before_and_after_it_rectifies(num_before: int) -> None:
    gradient, move, p = one_more_step(adam_like(torch.optim.RAdam, betas=(0.0, 0.99)), num_before)
    factors = move / (p * gradient)
    torch.testing.assert_close(factors, factors[0, 0].expand(5, 3), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("max_trust", [None, 0.5])
def test_the_p_of_lamb_is_that_of_adam_times_the_trust_ratio(corrected: bool, max_trust: float | None) -> None:
    make = adam_like(LAMB, betas=NO_MOMENTUM, bias_correction=corrected, max_trust=max_trust)
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    optimizer = make([parameter])
    optimizer.param_groups[0]["lr"] = 1e-9  # so small that the norm after the update is that before it
    for _ in range(4):
        parameter.grad = torch.randn(5, 3, dtype=torch.float64)
        before = parameter.detach().clone()
        optimizer.step()
    p = preconditioner(optimizer, parameter)
    assert p is not None
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.detach() - before, -1e-9 * p * parameter.grad, rtol=1e-5, atol=1e-14)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_there_is_no_p_without_second_moments(kind: type[Optimizer]) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], lr=0.1)  # type: ignore[call-arg]
    assert preconditioner(optimizer, parameter) is None
    assert not optimizer.state


def test_sgd_with_momentum_has_no_p_even_after_a_step() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert preconditioner(optimizer, parameter) is None


def test_half_precision_moments_give_a_float32_p() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(3, dtype=torch.bfloat16)
    optimizer.step()
    p = preconditioner(optimizer, parameter)
    assert p is not None
    assert p.dtype == torch.float32


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(BadArgument, match="torch optimizer"):
        preconditioner("adam", torch.ones(3))  # type: ignore[arg-type]


def test_the_weighted_square_is_the_plain_square_in_the_coordinates_where_adam_is_sgd() -> None:
    y = (POINT / P.sqrt()).requires_grad_()  # x = P^(1/2)·y
    x = P.sqrt() * y
    (by_y,) = torch.autograd.grad(x @ HESSIAN @ x / 2, y)
    torch.testing.assert_close(weighted_square(TRUE_GRADIENT, P), by_y.square().sum())


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0, 1e3)), min_size=1, max_size=20))
def test_a_weighted_square_is_the_sum_over_elements(pairs: list[tuple[float, float]]) -> None:
    gradient, p = torch.tensor(pairs, dtype=torch.float64).T
    square = weighted_square(gradient, p)
    assert float(square) == pytest.approx(sum(weight * g * g for g, weight in pairs), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_square_neither_overflows_nor_vanishes_in_the_gradients_own_precision(dtype: torch.dtype) -> None:
    large, small = torch.full((4,), 3e4, dtype=dtype), torch.full((4,), 2.0**-14, dtype=dtype)
    assert float(weighted_square(large, None)) == 4 * float(large[0]) ** 2
    assert float(weighted_square(small, torch.ones(4))) == 4 * 2.0**-28


@pytest.mark.parametrize("p", [None, torch.ones(3)])
def test_a_square_is_a_float64_scalar(p: Tensor | None) -> None:
    square = weighted_square(torch.ones(3), p)
    assert (square.dtype, square.shape) == (torch.float64, torch.Size([]))


@pytest.mark.parametrize(
    ("gradient", "p"),
    [
        (torch.ones(3), torch.ones(4)),
        (torch.ones(3, dtype=torch.complex64), None),
        (torch.ones(3).to_sparse(), None),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(gradient: Tensor, p: Tensor | None) -> None:
    with pytest.raises(BadArgument):
        weighted_square(gradient, p)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("num_elements", [0, 1, 7, PIECE, PIECE + 3])
def test_the_squares_of_all_parameters_are_those_by_p(name: str, num_elements: int) -> None:
    torch.manual_seed(2)
    parameter = nn.Parameter(torch.randn(num_elements))
    optimizer = OPTIMIZERS[name]([parameter])
    for _ in range(7):
        parameter.grad = torch.randn(num_elements)
        optimizer.step()
    gradient = torch.randn(num_elements)
    square = Preconditioners([optimizer]).square(parameter, gradient)
    assert square is not None
    by_p = weighted_square(gradient, preconditioner(optimizer, parameter))
    torch.testing.assert_close(square, by_p, rtol=1e-5, atol=1e-8)


def test_groups_with_different_rates_count_by_their_rates() -> None:
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([{"params": [one], "lr": 0.1}, {"params": [other], "lr": 0.025}])
    for parameter in (one, other):
        parameter.grad = torch.ones(3)
    optimizer.step()
    seen = Preconditioners([optimizer])
    first, second = (seen.square(parameter, torch.ones(3)) for parameter in (one, other))
    assert first is not None
    assert second is not None
    assert float(second) == pytest.approx(float(first) / 4)


def test_a_parameter_of_another_optimizer_or_without_state_has_no_square_by_p() -> None:
    new, plain = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    seen = Preconditioners([torch.optim.Adam([new]), torch.optim.SGD([plain], lr=0.1)])
    assert seen.square(new, torch.ones(3)) is None
    assert seen.square(plain, torch.ones(3)) is None


def test_a_gradient_that_is_all_but_zero_is_nothing_to_be_sure_of() -> None:
    scale = NoiseScale()
    for step in range(40):
        scale.add(step, 64, Measured(1e-305, 1e9))
    assert math.isinf(scale.noise.low)
    assert not scale.noise.sure
