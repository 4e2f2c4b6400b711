"""`run.total`: of what kinds the sums are, where a worker had no lanes, and where a sum does not fit."""

from typing import Any

import numpy as np
import pytest
import torch
from workers import on_workers, outcomes

import lockstep
from lockstep.errors import BadArgument

VALUES: dict[str, Any] = {
    "float": 2.5,
    "infinite": float("inf"),
    "int": 3,
    "list": [0.1],
    "float tensor": torch.tensor([0.5, 1.5]),
    "scalar tensor": torch.tensor(0.25, dtype=torch.float64),
    "table": torch.arange(6).view(2, 3),
    "booleans": torch.tensor([True, False]),
}


def summed(name: str, zero: Any) -> list[str]:
    """What a sum is where a lane gives the value, and who has no lane has `zero`."""
    run = lockstep.start(lanes=1)
    total: Any = zero
    for _ in run.lanes(torch.zeros(4)):
        total = VALUES[name]
    found = run.total(total)
    return [repr(found), str(getattr(found, "dtype", ""))]


@pytest.mark.parametrize("name", VALUES)
def test_the_plain_0_of_a_worker_without_lanes_is_a_zero_of_the_others_kind(name: str) -> None:
    (alone,) = on_workers(1, summed, name, 0)
    assert on_workers(3, summed, name, 0) == [alone] * 3


def test_other_values_of_another_kind_are_refused_on_all() -> None:
    for found in outcomes(3, summed, "table", 0.0):
        assert found.error == "Disagreement"
        assert "kind of value: worker" in found.message


def opposite_infinities() -> str:
    run = lockstep.start()
    return str(run.total(float("-inf") if run.rank else float("inf")))


def test_opposite_infinities_are_no_number() -> None:
    assert on_workers(2, opposite_infinities) == ["nan", "nan"]


def of_tensors(values: list[list[int]], kind: str) -> list[int]:
    run = lockstep.start()
    return run.total(torch.tensor(values[run.rank], dtype=getattr(torch, kind))).tolist()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("int64", [[2**62, -(2**63), -1], [2**62 - 1, 0, 2**40]]),
        ("uint8", [[200, 0, 1], [55, 255, 1]]),
        ("int8", [[-100, 127, 1], [-28, -128, 1]]),
    ],
)
def test_sums_of_whole_numbers_are_exact_to_the_last_one_that_fits(kind: str, values: list[list[int]]) -> None:
    assert on_workers(2, of_tensors, values, kind) == [[a + b for a, b in zip(*values, strict=True)]] * 2


@pytest.mark.parametrize(
    ("kind", "values", "instead"),
    [
        ("int64", [[2**62], [2**62]], "double"),
        ("int64", [[-(2**63)], [-1]], "double"),
        ("uint8", [[200], [56]], "long"),
        ("int32", [[-(2**31)], [-1]], "long"),
    ],
)
def test_a_sum_that_does_not_fit_its_tensor_is_refused_on_all(kind: str, values: list[list[int]], instead: str) -> None:
    for found in outcomes(2, of_tensors, values, kind):
        assert found.error == "BadArgument"
        assert f"does not fit {kind}: give run.total(value.{instead}())" in found.message


@pytest.mark.parametrize("item", [np.int64(3), np.float32(0.5), np.array(2), np.bool_(True), torch.tensor([2])])
def test_numbers_of_numpy_and_tensors_may_stand_in_a_list(item: Any) -> None:
    with lockstep.start(lanes=1) as run:
        for _ in run.lanes(torch.zeros(4)):
            pass
        assert run.total([item]) == item.item()


@pytest.mark.parametrize("number", [1j, np.complex64(1j), torch.tensor(1j)], ids=repr)
def test_complex_numbers_are_refused_by_their_kind(number: Any) -> None:
    with lockstep.start(lanes=1) as run:
        for _ in run.lanes(torch.zeros(4)):
            pass
        with pytest.raises(BadArgument, match="takes one real number per lane, not complex"):
            run.total([number])
        if not isinstance(number, torch.Tensor):
            with pytest.raises(BadArgument, match=r"adds real numbers, .*, not complex"):
                run.total(number)
