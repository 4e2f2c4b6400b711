"""The record of a step: what workers tell of their lanes, put together."""

import math
from copy import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.gradients.record import StepRecord, StepRequest

numbers = st.none() | st.floats()


def told(num_lanes: int, num_workers: int, data: st.DataObject) -> list[StepRecord]:
    """Records of workers that carry lanes in turn."""
    num_squares = data.draw(st.sampled_from([0, 2 * num_lanes]))
    num_parameters, num_buffers = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3))
    records = []
    for rank in range(num_workers):
        record = StepRecord.empty(num_lanes, num_parameters, num_buffers)
        record.squares = [None] * num_squares
        for lane in range(rank, num_lanes, num_workers):
            record.weights[lane], record.losses[lane] = data.draw(numbers), data.draw(numbers)
            if num_squares:
                record.squares[lane] = data.draw(numbers)
        record.used = data.draw(st.lists(st.booleans(), min_size=num_parameters, max_size=num_parameters))
        record.changed = data.draw(st.lists(st.booleans(), min_size=num_buffers, max_size=num_buffers))
        record.requests = data.draw(st.lists(st.booleans(), min_size=len(StepRequest), max_size=len(StepRequest)))
        record.health = bytes([rank]) * 5
        records.append(record)
    return records


def same(one: float | None, other: float | None) -> bool:
    both_nan = one is not None and other is not None and math.isnan(one) and math.isnan(other)
    return both_nan or one == other


@given(st.data(), st.integers(1, 5), st.integers(1, 4))
def test_all_workers_read_what_each_has_told(data: st.DataObject, num_lanes: int, num_workers: int) -> None:
    records = told(num_lanes, num_workers, data)
    packed = [record.pack(-(-num_lanes // num_workers)) for record in records]
    assert len(set(map(len, packed))) == 1
    for rank, record in enumerate(records):
        merged = copy(record)
        merged.merge(rank, {peer: packed[peer] for peer in range(num_workers) if peer != rank})
        for lane in range(num_lanes):
            carrier = records[lane % num_workers]
            assert same(merged.weights[lane], carrier.weights[lane])
            assert same(merged.losses[lane], carrier.losses[lane])
        assert all(map(same, merged.squares, [_first(values) for values in _columns(records, "squares")]))
        for field in ("used", "changed", "requests"):
            assert getattr(merged, field) == [any(values) for values in _columns(records, field)]
        assert merged.healths == [record.health for record in records]


@pytest.mark.parametrize("loss", [-0.0, 5e-324, math.inf, -math.inf])
def test_losses_at_the_edge_arrive(loss: float) -> None:
    mine, theirs = StepRecord.empty(2, 1, 0), StepRecord.empty(2, 1, 0)
    mine.losses[0], theirs.losses[1] = loss, 1.0
    packed = [mine.pack(1), theirs.pack(1)]
    mine.merge(0, {1: packed[1]})
    theirs.merge(1, {0: packed[0]})
    assert mine.losses == theirs.losses == [loss, 1.0]


def _columns(records: list[StepRecord], field: str) -> list[tuple[float | None, ...]]:
    return list(zip(*(getattr(record, field) for record in records), strict=True))


def _first(values: tuple[float | None, ...]) -> float | None:
    return next((value for value in values if value is not None), None)
