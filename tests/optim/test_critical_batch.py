"""The cost of a batch follows from the critical batch, and the critical batch from measured costs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import BadArgument
from lockstep.optim.noise.critical_batch import fit_samples, steps_and_samples

RESNET_50 = {4096: 40, 8192: 42, 13056: 45.4, 32768: 56, 49152: 68, 65536: 84.5}
"""Batch to epochs until 75.9 % accuracy: MLPerf training's public reference convergence points."""

sizes = st.floats(1, 1e7)


def test_at_the_critical_batch_steps_and_samples_are_twice_the_least() -> None:
    effort = steps_and_samples(512, 512, least_steps=1000, least_samples=512_000)
    assert (effort.steps, effort.samples) == (2000, 1_024_000)


@given(sizes, sizes)
def test_samples_are_steps_times_the_batch(batch: float, critical: float) -> None:
    effort = steps_and_samples(batch, critical, least_steps=1.0, least_samples=critical)
    assert effort.samples == pytest.approx(effort.steps * batch, rel=1e-9)


@given(sizes, sizes)
def test_steps_and_samples_lie_on_the_hyperbola_of_the_paper(batch: float, critical: float) -> None:
    effort = steps_and_samples(batch, critical)
    assert (effort.steps - 1) * (effort.samples - 1) == pytest.approx(1, rel=1e-6)


@given(st.floats(1, 1e9), st.floats(10, 1e6), st.sets(st.floats(0.1, 10), min_size=3, max_size=8))
def test_a_fit_through_points_of_the_curve_finds_the_curve(least: float, critical: float, ratios: set[float]) -> None:
    batches = {round(ratio, 1) * critical for ratio in ratios}
    if len(batches) < 3:
        return
    fit = fit_samples({batch: least * (1 + batch / critical) for batch in batches})
    assert (fit.least, fit.critical) == pytest.approx((least, critical), rel=1e-6)
    assert fit.worst_error < 1e-9


def test_a_fit_minimises_the_squared_relative_error() -> None:
    fit = fit_samples(RESNET_50)

    def error(least: float, slope: float) -> float:
        return sum(((least + slope * batch) / epochs - 1) ** 2 for batch, epochs in RESNET_50.items())

    best, slope = error(fit.least, fit.least / fit.critical), fit.least / fit.critical
    nearby = [(least, rise) for least in (0.999, 1.001) for rise in (0.999, 1.0, 1.001)]
    assert all(error(fit.least * least, slope * rise) > best for least, rise in nearby)


def test_a_fit_says_its_worst_error() -> None:
    fit = fit_samples(RESNET_50)
    misses = [abs(fit.predict(batch) / epochs - 1) for batch, epochs in RESNET_50.items()]
    assert fit.worst_error == pytest.approx(max(misses), rel=1e-9)
    assert fit.points == 6


@pytest.mark.parametrize("left_out", RESNET_50)
def test_the_epochs_of_resnet_50_are_predicted_within_10_percent_from_the_other_batches(left_out: int) -> None:
    fit = fit_samples({batch: epochs for batch, epochs in RESNET_50.items() if batch != left_out})
    assert fit.predict(left_out) == pytest.approx(RESNET_50[left_out], rel=0.10)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ({64: 1.0, 128: 1.1}, "3 batches or more"),
        ({64: 1.0, 128: 1.0, 256: 1.0}, "add larger"),
        ({64: 1.0, 128: 0.9, 256: 0.8}, "add larger"),
        ({64: 1.0, 128: 2.0, 256: 4.0}, "add smaller"),
        ({64: 1.0, 128: 3.0, 256: 8.0}, "add smaller"),
        ({64: 1.0, 0: 1.1, 256: 1.2}, "batch must be"),
        ({64: 1.0, 128: math.nan, 256: 1.2}, "samples at batch 128"),
        ({64: 1.0, 128: -1.0, 256: 1.2}, "samples at batch 128"),
    ],
)
def test_points_that_no_critical_batch_explains_are_refused(points: dict[float, float], words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        fit_samples(points)


@pytest.mark.parametrize(("batch", "critical"), [(0, 1), (1, 0), (-1, 1), (1, math.inf), (math.nan, 1), ("1", 1)])
def test_a_batch_that_is_no_number_of_samples_is_refused(batch: float, critical: float) -> None:
    with pytest.raises(BadArgument, match="must be a number above 0"):
        steps_and_samples(batch, critical)
