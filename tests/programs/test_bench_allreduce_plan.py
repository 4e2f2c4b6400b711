"""What an all-reduce benchmark measures, in which order, and what is made of the times. Nothing runs here."""

import io
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lockstep.errors import BadArgument
from lockstep.programs.bench.allreduce.plan import SIDES, AllreducePlan, crowding, make_plans, make_row, show
from lockstep.programs.bench.allreduce.sizes import USUAL, KiB, MiB, named, parse_sizes
from lockstep.programs.bench.allreduce.worker import BLOCK_S, LEAST, MOST, repetitions, slowest
from lockstep.programs.bench.launch import ResultsDiffer, accept
from lockstep.programs.bench.plan import BenchResult
from lockstep.programs.bench.report import quantile
from lockstep.programs.bench.rounds import order

MACHINE = {"cores": 2, "cpu": "A Processor Of Some Length @ 2.00GHz", "torch": "2.13.0+cpu", "threads_per_worker": 1}


def row_of(workers: int, num_bytes: int, *sides: Sequence[float]) -> dict[str, Any]:
    rounds = [dict(zip(SIDES, each, strict=True)) for each in zip(*sides, strict=True)]
    return make_row(workers, num_bytes, rounds, {"lockstep": 9.0, "gloo": 99.0, "floor": 1.0}, dict.fromkeys(SIDES, 3))


def row(*sides: Sequence[float]) -> dict[str, Any]:
    return row_of(2, 1000, *sides)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4KiB", (4 * KiB,)),
        ("1MiB,4KiB,1MiB", (MiB, 4 * KiB)),
        ("8, 12 B,1gib", (8, 12, 1024 * MiB)),
        ("4KiB..128MiB", USUAL),
        ("16KiB..1MiB", (16 * KiB, 64 * KiB, 256 * KiB, MiB)),
        ("1KiB..5KiB", (KiB, 4 * KiB, 5 * KiB)),
        ("8KiB..8KiB", (8 * KiB,)),
        ("8B,64KiB..256KiB", (8, 64 * KiB, 256 * KiB)),
    ],
)
def test_sizes_are_lists_and_ranges_with_their_ends(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text", ["", "4KiB,", "4KB", "-4KiB", "4.5KiB", "..4KiB", "4KiB..", "4..8..16", "four", "٤KiB"]
)
def test_what_is_not_a_size_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(BadArgument, match=r'"4KiB,1MiB" or a range such as "4KiB..128MiB", in B, KiB, MiB or GiB'):
        parse_sizes(text)


@pytest.mark.parametrize("text", ["0", "0MiB", "3", "4KiB,6B"])
def test_a_size_that_holds_no_whole_float32_is_refused(text: str) -> None:
    with pytest.raises(BadArgument, match="no whole number of float32"):
        parse_sizes(text)


def test_a_range_that_runs_backwards_is_refused() -> None:
    with pytest.raises(BadArgument, match=r"1MiB\.\.4KiB ends below its beginning"):
        parse_sizes("1MiB..4KiB")


@given(st.integers(1, 2**40).map(lambda elements: 4 * elements))
def test_a_size_is_read_back_from_its_name(num_bytes: int) -> None:
    assert parse_sizes(named(num_bytes)) == (num_bytes,)


def test_every_number_of_workers_and_every_size_is_measured_once() -> None:
    plans = make_plans((4, 2, 4), (8, 4, 8), "shared", rounds=3)
    assert [(plan.workers, plan.sizes) for plan in plans] == [(4, (8, 4)), (2, (8, 4))]


def test_an_allreduce_of_one_worker_is_refused() -> None:
    with pytest.raises(BadArgument, match="needs 2 workers or more, not 1"):
        make_plans((1,), (8,), "shared", rounds=1)


def test_an_allreduce_plan_reaches_the_workers_unchanged() -> None:
    plan = AllreducePlan(3, (4, 8), "ring", rounds=2)
    assert AllreducePlan.read(plan.written()) == plan


@pytest.mark.parametrize("first", [0, 3, 6])
def test_in_three_rounds_every_side_stands_once_in_every_place(first: int) -> None:
    places = [(place, side) for number in range(first, first + 3) for place, side in enumerate(order(SIDES, number))]
    assert sorted(places) == sorted(itertools.product(range(3), SIDES))


def test_in_six_rounds_a_side_follows_another_as_often_as_that_follows_it() -> None:
    follows = [pair for number in range(6) for pair in itertools.pairwise(order(SIDES, number))]
    assert all(follows.count((a, b)) == follows.count((b, a)) for a, b in itertools.permutations(SIDES, 2))


def test_only_more_workers_than_cores_are_warned_of() -> None:
    plans = make_plans((2, 4, 8), (8,), "shared", rounds=1)
    assert crowding(plans, num_cores=8) is None
    assert str(crowding(plans, num_cores=2)).startswith("! 4 and 8 workers share 2 cores")


def test_the_ratio_to_gloo_is_made_within_rounds_and_has_quartiles() -> None:
    made = row((10, 20, 40, 10, 10), (20, 10, 120, 40, 50), (5, 5, 5, 5, 5))
    assert [made[f"ratio_to_gloo{end}"] for end in ("_low", "", "_high")] == [2, 3, 4]


def test_times_are_medians_over_rounds() -> None:
    made = row((1, 2, 9), (30, 10, 20), (0.5, 4, 0.5))
    assert [made[f"{side}_ms"] for side in SIDES] == [2, 20, 0.5]
    assert made["ratio_to_floor"] == 4


def test_bandwidth_is_the_tensors_bytes_by_the_time() -> None:
    made = row((0.001,), (0.01,), (0.001,))
    assert (made["bandwidth_gb_per_s"], made["gloo_bandwidth_gb_per_s"]) == pytest.approx((1.0, 0.1))


def test_a_block_takes_as_long_as_its_slowest_worker() -> None:
    block = slowest([torch.tensor([7.0, 9.0, 10.0]).double(), torch.tensor([0.0, 1.0, 4.0]).double()])
    assert block.mean_ms == 2000
    assert block.each_ms == [2000, 3000]


@given(st.floats(1e-9, 1e3))
def test_a_block_is_about_as_long_as_wanted_within_bounds(operation_s: float) -> None:
    count = repetitions(operation_s)
    assert LEAST <= count <= MOST
    assert count in (LEAST, MOST) or abs(count * operation_s - BLOCK_S) <= operation_s


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_quantile_agrees_with_torch(values: list[float], fraction: float) -> None:
    expected = torch.tensor(values, dtype=torch.float64).quantile(fraction).item()
    assert quantile(values, fraction) == pytest.approx(expected)


def test_a_refused_sum_never_becomes_a_row() -> None:
    with pytest.raises(ResultsDiffer, match="wrong on worker 1"):
        accept(BenchResult("wrong on worker 1", (), {}))


def test_the_table_has_one_line_for_each_row_and_fits_100_columns() -> None:
    small, large = ((0.01234,), (22.22,), (0.000123,)), ((1234,), (12345,), (999.9,))
    sizes = {4 * KiB: small, 128 * MiB: large}
    rows = [row_of(count, size, *sides) for count in (2, 16) for size, sides in sizes.items()]
    shown = io.StringIO()
    show({"algorithm": "halving_doubling", "rows": rows, "machine": MACHINE}, Console(file=shown))
    lines = shown.getvalue().splitlines()
    assert "…" not in shown.getvalue()
    assert max(map(len, lines)) <= 100
    assert sum(" KiB " in line or " MiB " in line for line in lines) == 4
