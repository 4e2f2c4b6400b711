"""Gradients that are not finite: named exactly, told in a fixed record, decided alike by all."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import BadArgument
from lockstep.gradients.finite import (
    FINDING_BYTES,
    BadGradient,
    LaneFinding,
    Policy,
    decide,
    first_bad,
    pack,
    unpack,
)
from lockstep.gradients.plan import StepPlan
from lockstep.lanes import Assignment

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
NAMES = ("stem.weight", "body.0.weight", "head.bias")

numbers = st.sampled_from([0.0, 1.0, -3.5, 6e4, -6e4, math.inf, -math.inf, math.nan])
tensors = st.builds(lambda values, dtype: torch.tensor(values).to(dtype), st.lists(numbers), st.sampled_from(FLOATS))


def slowly(gradients: dict[str, torch.Tensor]) -> BadGradient | None:
    """What `first_bad` must find, element by element."""
    for name, tensor in gradients.items():
        parts = [(complex(value).real, complex(value).imag) for value in tensor.tolist()]
        bad = [pair for pair in parts if not all(map(math.isfinite, pair))]
        if bad:
            return BadGradient(name, "nan" if any(map(math.isnan, sum(bad, ()))) else "inf", len(bad))
    return None


def finding(lane: int = 5, kind: str = "nan", count: int = 31, samples: range = range(40, 48)) -> LaneFinding:
    return LaneFinding(lane, lane // 2, "body.0.weight", kind, count, samples)  # type: ignore[arg-type]


@given(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), tensors))
def test_the_first_bad_gradient_is_named_with_kind_and_count(gradients: dict[str, torch.Tensor]) -> None:
    assert first_bad(gradients) == slowly(gradients)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_finite_gradient_is_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert (
        first_bad({"w": torch.full((1000,), largest, dtype=dtype), "v": torch.full((9,), -largest, dtype=dtype)})
        is None
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_bad_element_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    for place in (0, 500, 1000):
        gradient = torch.ones(1001, dtype=dtype)
        gradient[place] = value
        assert first_bad({"w": gradient}) == BadGradient("w", "nan" if math.isnan(value) else "inf", 1)


def test_opposite_infinities_do_not_hide_each_other() -> None:
    assert first_bad({"w": torch.tensor([math.inf, -math.inf])}) == BadGradient("w", "inf", 2)


def test_a_huge_finite_gradient_before_a_bad_one_is_not_blamed() -> None:
    gradients = {"huge": torch.full((10,), 3e38), "bad": torch.tensor([math.inf])}
    assert first_bad(gradients) == BadGradient("bad", "inf", 1)


def test_the_first_in_the_order_given_is_named_whatever_its_dtype() -> None:
    gradients = {
        "fine": torch.ones(2),
        "half": torch.tensor([math.inf], dtype=torch.float16),
        "full": torch.tensor([math.nan]),
    }
    assert first_bad(gradients) == BadGradient("half", "inf", 1)


def test_no_gradients_and_empty_gradients_are_finite() -> None:
    assert first_bad({}) is None
    assert first_bad({"w": torch.empty(0), "v": torch.empty(0, dtype=torch.float16)}) is None


def test_a_gradient_that_is_not_contiguous_is_seen_whole() -> None:
    whole = torch.ones(4, 6)
    whole[3, 4] = math.nan
    assert first_bad({"w": whole.t()[::2]}) == BadGradient("w", "nan", 1)
    assert first_bad({"w": whole.t()[1::2]}) is None


def test_a_bad_value_of_a_sparse_gradient_is_found() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, math.inf]), (4,), check_invariants=True)
    assert first_bad({"embedding": sparse}) == BadGradient("embedding", "inf", 1)


@given(st.data(), st.integers(1, 9), st.integers(1, 5), st.sampled_from(["nan", "inf"]), st.integers(1, 2**40))
def test_a_finding_survives_its_record(
    data: st.DataObject, num_lanes: int, num_workers: int, kind: str, count: int
) -> None:
    step = StepPlan(0, 100, Assignment.even(num_lanes, num_workers))
    lane, name = data.draw(st.integers(0, num_lanes - 1)), data.draw(st.sampled_from(NAMES))
    result = LaneFinding.of(lane, BadGradient(name, kind, count), step)  # type: ignore[arg-type]
    assert unpack(pack(result, NAMES), NAMES, step) == result


def test_every_record_has_the_same_size() -> None:
    assert len(pack(None, NAMES)) == len(pack(finding(), NAMES)) == FINDING_BYTES


def test_nothing_found_survives_its_record() -> None:
    assert unpack(pack(None, NAMES), NAMES, StepPlan(0, 64, Assignment.even(8, 4))) is None


def test_a_lane_knows_its_worker_and_its_samples() -> None:
    result = LaneFinding.of(5, BadGradient("head.bias", "inf", 2), StepPlan(0, 64, Assignment.even(8, 4)))
    assert (result.worker, result.samples) == (2, range(40, 48))


def test_finite_lanes_need_no_verdict() -> None:
    assert decide("stop", []) is None


@pytest.mark.parametrize("policy", ["keep", "skip", "stop"])
def test_the_action_is_the_policy(policy: Policy) -> None:
    verdict = decide(policy, [finding()])
    assert verdict is not None
    assert verdict.action == policy


@given(st.permutations([finding(1), finding(5), finding(7)]))
def test_the_verdict_does_not_depend_on_who_was_heard_first(findings: list[LaneFinding]) -> None:
    assert decide("skip", findings) == decide("skip", [finding(1), finding(5), finding(7)])


def test_an_unknown_policy_is_refused_with_those_allowed() -> None:
    with pytest.raises(BadArgument, match="'keep', 'skip' or 'stop'"):
        decide("ignore", [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "outcome"),
    [
        ("keep", "the step is applied as it is on every worker"),
        ("skip", "the step is skipped on every worker"),
        ("stop", "the step is not applied and the run stops on every worker"),
    ],
)
def test_the_sentence_names_lane_worker_parameter_samples_and_outcome(policy: Policy, outcome: str) -> None:
    verdict = decide(policy, [finding()])
    assert verdict is not None
    assert verdict.sentence(412) == (
        "! step 412: gradient of lane 5 (worker 2) is not finite: first in body.0.weight (nan, 31 elements), "
        f"samples 40-47 of the batch; {outcome}"
    )


def test_one_element_of_one_sample_on_a_worker_with_another_slot_is_told_so() -> None:
    verdict = decide("skip", [finding(1, "inf", 1, range(3, 4))])
    assert verdict is not None
    assert "(worker 6)" in verdict.sentence(9, slots=[6, 8])
    assert "(inf, 1 element), sample 3 of the batch;" in verdict.sentence(9, slots=[6, 8])


def test_other_lanes_are_counted_after_the_first() -> None:
    verdict = decide("skip", [finding(7), finding(1), finding(5)])
    assert verdict is not None
    assert "lane 1 (worker 0)" in verdict.sentence(9)
    assert "; also in lanes 5, 7; the step is skipped" in verdict.sentence(9)


@pytest.mark.cuda
@given(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), tensors))
def test_the_first_bad_gradient_on_a_device_is_named_with_kind_and_count(gradients: dict[str, torch.Tensor]) -> None:
    assert first_bad({name: tensor.cuda() for name, tensor in gradients.items()}) == slowly(gradients)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_finite_gradient_on_a_device_is_finite(dtype: torch.dtype) -> None:
    assert first_bad({"w": torch.full((1000,), torch.finfo(dtype).max, dtype=dtype, device="cuda")}) is None
