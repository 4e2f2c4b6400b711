"""The choice of algorithm and bucket size: a pure function of the message, the workers and the link."""

from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_wires import open_wire
from workers import on_workers

from lockstep.errors import BadArgument
from lockstep.lanes import Assignment, Reduction, reduction
from lockstep.programs.explain.proof import prove
from lockstep.wire.choice import EXACT, LATENCY_SHARE, always, bucket_bytes, cheapest, prices_s
from lockstep.wire.link import Link, measure

MiB = 2**20
ETHERNET = Link(latency_s=1e-4, bytes_per_s=1e9)

links = st.builds(Link, st.floats(1e-6, 1e-1), st.floats(1e6, 1e11))


def _one_each(num_workers: int) -> Reduction:
    return reduction(Assignment.even(num_workers, num_workers), tuple(range(num_workers)))


def test_small_messages_take_one_round_and_large_ones_few_bytes() -> None:
    choose, whole = cheapest(ETHERNET), _one_each(8)
    assert len(choose(whole, 1024).rounds) == 1
    assert len(choose(whole, 25 * MiB).rounds) == 2


def test_two_workers_always_exchange_in_one_round() -> None:
    assert len(cheapest(ETHERNET)(_one_each(2), 25 * MiB).rounds) == 1


@given(st.integers(2, 9), st.integers(1, 4), st.integers(1, 2**30), links)
def test_the_price_is_that_of_the_proved_schedule(
    num_workers: int, lanes_each: int, num_bytes: int, link: Link
) -> None:
    lanes = [range(rank, num_workers * lanes_each, num_workers) for rank in range(num_workers)]  # no two merge
    whole = reduction(Assignment.explicit(lanes), tuple(range(num_workers * lanes_each)))
    if set(whole.roots_of) != {lanes_each}:
        return  # prices are for workers with equally many roots
    for name, price in prices_s(whole, num_bytes, link).items():
        proof = prove(EXACT[name](whole))
        assert price == pytest.approx(link.price_s(proof.rounds, proof.most_bytes_sent(num_bytes)))


@given(st.integers(2, 64), st.integers(1, 2**30), links)
def test_the_cheapest_is_chosen(num_workers: int, num_bytes: int, link: Link) -> None:
    whole = _one_each(num_workers)
    prices = prices_s(whole, num_bytes, link)
    chosen = cheapest(link)(whole, num_bytes)
    (name,) = [name for name, make in EXACT.items() if make(whole) == chosen]
    assert prices[name] == min(prices.values())


def test_an_algorithm_asked_for_by_name_is_used_for_all_messages() -> None:
    assert len(always("direct")(_one_each(8), 4).rounds) == 2
    assert len(always("oneshot")(_one_each(8), 25 * MiB).rounds) == 1


def test_an_unknown_algorithm_is_refused_with_those_that_exist() -> None:
    with pytest.raises(BadArgument, match=r"'direct', 'oneshot'.*'carrier pigeon'"):
        always("carrier pigeon")


@given(links, st.integers(2, 64))
def test_buckets_are_within_bounds_and_whole(link: Link, num_workers: int) -> None:
    size = bucket_bytes(link, num_workers)
    assert MiB <= size <= 25 * MiB
    assert size % MiB == 0


def test_between_the_bounds_latency_is_a_tenth_of_a_buckets_time() -> None:
    link, num_workers = Link(latency_s=5e-4, bytes_per_s=1e9), 4
    size = bucket_bytes(link, num_workers)
    whole_s = link.price_s(2, 2 * (num_workers - 1) / num_workers * size)
    assert 2 * link.latency_s / whole_s == pytest.approx(LATENCY_SHARE, rel=0.15)


def _measure_by_a_made_up_clock() -> list[float]:
    """Every look at the clock is 1 s later on worker 0 and 3 s later on worker 1."""
    with open_wire("shared") as wire:
        pace = 1 + 2 * wire.world.rank
        ticks = count(0, pace)
        link = measure(wire.reducer, wire.transport, clock=lambda: float(next(ticks)))
        return [link.latency_s, link.bytes_per_s]


def test_all_workers_agree_on_the_slowest_workers_link() -> None:
    first, second = on_workers(2, _measure_by_a_made_up_clock)
    assert first == second
    assert first[0] == 1.5  # 3 s for the two rounds of a reduction


def _measured(kind: str) -> list[float]:
    with open_wire(kind) as wire:
        assert wire.link is not None
        return [wire.link.latency_s, wire.link.bytes_per_s, torch.get_num_threads()]


@pytest.mark.parametrize("kind", ["gloo", "shared", "hierarchical"])
def test_an_opened_wire_has_one_link_on_all_workers(kind: str) -> None:
    first, *others = on_workers(3, _measured, kind)
    assert all(other == first for other in others)
    assert first[0] > 0
    assert first[1] > 0
