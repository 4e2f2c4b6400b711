"""Gradients that are added up in another dtype than their parameters'."""

import dataclasses
import json
import os
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from workers import on_workers, outcomes

import lockstep
from lockstep.errors import BadArgument
from lockstep.gradients import bucket_set
from lockstep.gradients.layout import Spec, make_layout
from lockstep.run.terms import terms
from lockstep.settings.environment import Overrides
from lockstep.settings.options import REDUCE_DTYPES, Options, resolve
from lockstep.world import World

X = torch.randn(61, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (61,), generator=torch.Generator().manual_seed(1))

CASES = [
    pytest.param("float32", "bfloat16", id="float32 in bfloat16"),
    pytest.param("bfloat16", "float32", id="bfloat16 in float32"),
]


def net(dtype: str = "float32") -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(getattr(torch, dtype))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)


def trained(dtype: str, reduce_dtype: str | None, lanes: int = 5, **options: Any) -> list[Any]:
    """Trains for six uneven batches; gives the digest and the noise."""
    run = lockstep.start(lanes=lanes, seed=3, reduce_dtype=reduce_dtype, noise_every=2, **options)
    model = net(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    run.replicate(model, optimizer)
    for first in range(0, 60, 11):
        for x, y in run.lanes((X[first : first + 11], Y[first : first + 11])):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert run.noise.count == 2 if lanes > 1 else run.noise.count == 0
    return [run.digest(), list(dataclasses.astuple(run.noise))]


@cache
def trained_alone(dtype: str, reduce_dtype: str | None, lanes: int = 5) -> list[Any]:
    return on_workers(1, trained, dtype, reduce_dtype, lanes)[0]


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "num_workers"),
    [
        ("float32", "bfloat16", 2),
        ("float32", "bfloat16", 3),
        ("bfloat16", "float32", 2),
        ("bfloat16", "float32", 3),
        ("float32", "float16", 3),
        ("float32", "float64", 3),
        ("float16", "bfloat16", 3),
    ],
)
def test_digest_and_noise_are_the_same_on_any_number_of_workers(
    dtype: str, reduce_dtype: str, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = trained_alone(dtype, reduce_dtype)
    monkeypatch.setattr(bucket_set, "make_layout", partial(make_layout, first_bucket_bytes=100))
    assert on_workers(num_workers, trained, dtype, reduce_dtype, bucket_bytes=100) == [alone] * num_workers


def test_the_wire_does_not_change_the_digest() -> None:
    alone = trained_alone("float32", "bfloat16")
    assert on_workers(3, trained, "float32", "bfloat16", wire="gloo") == [alone] * 3


@pytest.mark.parametrize(("dtype", "reduce_dtype"), CASES)
def test_a_lane_that_is_alone_has_the_same_digest_on_three_workers(dtype: str, reduce_dtype: str) -> None:
    alone = trained_alone(dtype, reduce_dtype, 1)
    assert on_workers(3, trained, dtype, reduce_dtype, lanes=1) == [alone] * 3


def test_the_dtype_changes_the_numbers() -> None:
    digests = [trained_alone("float32", name)[0] for name in (None, "bfloat16", "float16", "float64")]
    assert len(set(digests)) == 4


def test_asking_for_the_dtype_of_the_parameters_changes_nothing() -> None:
    assert trained_alone("float32", "float32") == trained_alone("float32", None)


def test_the_noise_is_near_that_of_the_usual_sum() -> None:
    (_, usual), (_, found) = trained_alone("float32", None), trained_alone("float32", "bfloat16")
    numbers = [(here, there) for here, there in zip(usual, found, strict=True) if isinstance(here, float)]
    assert all(there == pytest.approx(here, rel=0.05) for here, there in numbers)


# -- against a plain loop ---------------------------------------------------------------------------------


def lane_gradients(dtype: str, lanes: int, num_samples: int) -> tuple[list[list[torch.Tensor]], list[int]]:
    """What plain torch gives for each lane's samples, and how many they are."""
    gradients, sizes = [], []
    for lane in range(lanes):
        part = slice(num_samples * lane // lanes, num_samples * (lane + 1) // lanes)
        model = net(dtype)
        loss_of(model, X[part], Y[part]).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        sizes.append(part.stop - part.start)
    return gradients, sizes


def of_four_lanes(terms: list[torch.Tensor]) -> torch.Tensor:
    return (terms[0] + terms[1]) + (terms[2] + terms[3])


@pytest.mark.parametrize(("dtype", "reduce_dtype"), [*CASES, ("float32", "float16"), ("float64", "float32")])
def test_a_lane_is_converted_then_weighted_then_added_and_only_the_sum_converted_back(
    dtype: str, reduce_dtype: str
) -> None:
    wide = getattr(torch, reduce_dtype)
    gradients, sizes = lane_gradients(dtype, 4, 13)
    model = net(dtype)
    with lockstep.start(lanes=4, reduce_dtype=reduce_dtype) as run:
        run.replicate(model)
        for x, y in run.lanes((X[:13], Y[:13])):
            loss_of(model, x, y).backward()
    for place, parameter in enumerate(model.parameters()):
        terms = [lane[place].to(wide) * (size / 13) for lane, size in zip(gradients, sizes, strict=True)]
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype
        assert torch.equal(parameter.grad, of_four_lanes(terms).to(parameter.dtype))


@pytest.mark.parametrize(("dtype", "reduce_dtype"), CASES)
def test_the_scale_of_told_weights_is_applied_to_the_sum_before_it_is_converted_back(
    dtype: str, reduce_dtype: str
) -> None:
    weights, wide = (3.0, 5.0, 2.0, 9.0), getattr(torch, reduce_dtype)
    gradients, _ = lane_gradients(dtype, 4, 13)
    model = net(dtype)
    with lockstep.start(lanes=4, reduce_dtype=reduce_dtype) as run:
        run.replicate(model)
        for (x, y), weight in zip(run.lanes((X[:13], Y[:13])), (*weights, None), strict=False):
            run.backward(loss_of(model, x, y), weight=weight)
    for place, parameter in enumerate(model.parameters()):
        terms = [lane[place].to(wide) * (weight / 13) for lane, weight in zip(gradients, weights, strict=True)]
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, (of_four_lanes(terms) * (13 / sum(weights))).to(parameter.dtype))


def test_bfloat16_gradients_are_nearer_to_the_exact_sum_when_added_in_float32() -> None:
    gradients, sizes = lane_gradients("bfloat16", 16, 61)

    def error(reduce_dtype: str | None) -> float:
        model = net("bfloat16")
        with lockstep.start(lanes=16, reduce_dtype=reduce_dtype) as run:
            run.replicate(model)
            for x, y in run.lanes((X, Y)):
                loss_of(model, x, y).backward()
        squares = 0.0
        for place, parameter in enumerate(model.parameters()):
            exact = sum(lane[place].double() * (size / 61) for lane, size in zip(gradients, sizes, strict=True))
            assert parameter.grad is not None
            squares += float((parameter.grad.double() - exact).square().sum())
        return squares**0.5

    assert error("float32") < error(None)


# -- what stands beside it --------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "reduce_dtype"), CASES)
def test_gradients_of_two_loops_are_added_in_the_dtype_of_the_parameter(dtype: str, reduce_dtype: str) -> None:
    model = net(dtype)
    with lockstep.start(lanes=3, reduce_dtype=reduce_dtype) as run:
        run.replicate(model)
        found = []
        for last in (20, 41):
            for x, y in run.lanes((X[last - 20 : last], Y[last - 20 : last])):
                loss_of(model, x, y).backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        for x, y in run.lanes((X[21:41], Y[21:41])):
            loss_of(model, x, y).backward()
        second = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(both, a + b) for a, both, b in zip(*found, second, strict=True))


def test_a_gradient_that_is_not_finite_in_the_dtype_of_the_sum_is_found() -> None:
    model = net()
    with lockstep.start(lanes=2, reduce_dtype=torch.float16, not_finite="skip") as run:
        run.replicate(model)
        for x, y in run.lanes((X, Y)):
            (loss_of(model, x, y) * 1e7).backward()
        assert [p.grad for p in model.parameters()] == [None] * 4


def test_a_gradient_that_is_finite_in_both_is_handed_over() -> None:
    model = net()
    with lockstep.start(lanes=2, reduce_dtype=torch.float16, not_finite="skip") as run:
        run.replicate(model)
        for x, y in run.lanes((X, Y)):
            loss_of(model, x, y).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_complex_gradients_are_left_alone() -> None:
    def gradient(reduce_dtype: str | None) -> torch.Tensor:
        model = nn.Linear(6, 2, dtype=torch.complex64)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        with lockstep.start(lanes=3, reduce_dtype=reduce_dtype) as run:
            run.replicate(model)
            for x in run.lanes(X):
                model(x.to(torch.complex64)).abs().sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    assert torch.equal(gradient("bfloat16"), gradient(None))


def test_a_parameter_that_no_lane_used_has_no_gradient() -> None:
    model = nn.ModuleList([net(), nn.Linear(2, 2)])
    with lockstep.start(lanes=2, reduce_dtype="bfloat16") as run:
        run.replicate(model)
        for x, y in run.lanes((X, Y)):
            loss_of(model[0], x, y).backward()
    assert [p.grad is None for p in model.parameters()] == [False] * 4 + [True] * 2


specs = st.lists(
    st.builds(
        Spec,
        st.uuids().map(str),
        st.tuples(st.integers(0, 50)),
        st.just((1,)),
        st.sampled_from([torch.float32, torch.bfloat16, torch.complex64]),
        st.just("cpu"),
        st.just(True),
        reduced_as=st.sampled_from([None, torch.float64, torch.bfloat16]),
    ),
    max_size=30,
)


@given(specs)
def test_a_bucket_has_one_dtype_of_its_parameters_and_one_on_the_wire(listed: list[Spec]) -> None:
    for bucket in make_layout(listed, bucket_bytes=200).buckets:
        found = {(slot.spec.dtype, slot.spec.wire_dtype) for slot in bucket.slots}
        assert found == {(bucket.parameter_dtype, bucket.dtype)}


def test_the_size_of_a_bucket_is_counted_on_the_wire() -> None:
    half = [Spec(name, (128,), (1,), torch.float32, "cpu", True, reduced_as=torch.bfloat16) for name in "ab"]
    assert len(make_layout(half, first_bucket_bytes=512).buckets) == 1
    assert len(make_layout(half, first_bucket_bytes=511).buckets) == 2


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.int32, torch.complex64, "bf16", "torch.float32", 32, True, "", [torch.float32]])
def test_another_value_is_refused_with_what_is_allowed(bad: Any) -> None:
    with pytest.raises(BadArgument, match=r"reduce_dtype must be one of torch\.float32, .* or None .*, not"):
        lockstep.start(reduce_dtype=bad)


@pytest.mark.parametrize(("name", "dtype"), REDUCE_DTYPES.items())
def test_a_dtype_may_be_told_by_its_name(name: str, dtype: torch.dtype) -> None:
    by_name, by_itself = (resolve(Options(reduce_dtype=result), Overrides(), World()) for result in (name, dtype))
    assert by_name.reduce_dtype is by_itself.reduce_dtype is dtype


def test_workers_with_different_dtypes_are_refused_at_the_start() -> None:
    found = outcomes(2, _start_by_rank)
    assert [outcome.error for outcome in found] == ["Disagreement"] * 2
    assert "disagree on reduce_dtype: worker 0 has torch.bfloat16, worker 1 has None" in found[0].message


def _start_by_rank() -> None:
    lockstep.start(reduce_dtype="bfloat16" if os.environ["RANK"] == "0" else None)


def test_a_newcomer_is_told_the_dtype() -> None:
    result = terms(resolve(Options(reduce_dtype="bfloat16"), Overrides(), World()))
    assert json.loads(json.dumps(result))["reduce_dtype"] == "torch.bfloat16"
