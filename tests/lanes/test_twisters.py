"""The global generators of Python and NumPy: a state that is put back goes on as if nothing had happened."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.chance import MOST_REMEMBERED, NumpyTwister, PythonTwister, Twister


@dataclass(frozen=True)
class Kind:
    """A generator, and ways to draw from it."""

    make: Callable[[], Twister]
    seed: Callable[[int], None]
    draws: dict[str, Callable[[], Any]]
    normal: Callable[[], float]

    def drawn(self, names: list[str]) -> list[Any]:
        return [self.draws[name]() for name in names]


PYTHON = Kind(
    PythonTwister,
    random.seed,
    {
        "uniform": random.random,
        "normal": lambda: random.gauss(0, 1),  # comes in pairs: the second is kept
        "bits": lambda: random.getrandbits(100),
        "order": lambda: random.sample(range(7), 7),
        "a new block of words": lambda: [random.random() for _ in range(400)],
    },
    lambda: random.gauss(0, 1),
)
NUMPY = Kind(
    lambda: NumpyTwister(np.random),
    np.random.seed,
    {
        "uniform": np.random.rand,
        "normal": np.random.randn,
        "bits": lambda: int(np.random.randint(0, 10)),
        "order": lambda: np.random.permutation(7).tolist(),
        "a new block of words": lambda: np.random.rand(400).tolist(),
    },
    np.random.randn,
)
KINDS = pytest.mark.parametrize("kind", [PYTHON, NUMPY], ids=["python", "numpy"])

draws = st.lists(st.sampled_from(sorted(PYTHON.draws)), max_size=6)


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    before = random.getstate(), np.random.get_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])


def equal(one: Any, other: Any) -> bool:
    return repr(one) == repr(other) and all(map(np.array_equal, one, other))


@KINDS
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), rounds=st.lists(st.tuples(draws, draws, draws), max_size=5))
def test_reading_and_writing_are_as_the_generators_own(
    kind: Kind, seed: int, rounds: list[tuple[list[str], list[str], list[str]]]
) -> None:
    twister = kind.make()
    kind.seed(seed)
    for outside, inside, after in rounds:
        kind.drawn(outside)
        before = twister.get()
        read = twister.read()
        assert equal(read, before)
        expected = kind.drawn(after)
        kind.seed(5)
        kind.drawn(inside)
        twister.write(read)
        assert equal(twister.get(), before)
        assert kind.drawn(after) == expected
        twister.put(before)


def refuse(*_: Any) -> None:
    raise AssertionError("the generator was asked")


@KINDS
def test_a_state_that_nobody_has_drawn_from_is_read_and_written_in_memory(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind.seed(1)
    twister = kind.make()
    first = twister.read()
    for asked in ("get", "put", "memory_of"):
        monkeypatch.setattr(twister, asked, refuse)
    number = kind.normal()
    twister.write(first)
    assert twister.read() is first
    assert kind.normal() == number


@KINDS
def test_a_normal_number_that_is_kept_is_drawn_next(kind: Kind) -> None:
    kind.seed(1)
    twister = kind.make()
    twister.read()
    kind.normal()
    kept = twister.read()
    second = kind.normal()
    kind.seed(2)
    twister.write(kept)
    assert kind.normal() == second


@KINDS
def test_a_normal_number_that_is_kept_inside_is_not_drawn_outside(kind: Kind) -> None:
    kind.seed(1)
    twister = kind.make()
    before = twister.read()
    expected = kind.normal()
    kind.seed(2)
    kind.normal()
    twister.write(before)
    assert kind.normal() == expected


def test_python_tells_a_number_kept_beside_the_words_of_a_remembered_state() -> None:
    random.seed(1)
    twister = PythonTwister()
    random.gauss(0, 1)
    with_number = random.getstate()
    random.gauss(0, 1)  # the kept one: the words stay
    assert twister.read()[2] is None
    random.setstate(with_number)
    assert twister.read() == with_number


@KINDS
def test_memory_that_does_not_hold_what_the_generator_says_is_not_believed(kind: Kind) -> None:
    kind.seed(4)
    twister: Any = kind.make()
    other = bytes(len(twister.memory_of(twister.get())))
    twister.memory_of = lambda state: other
    assert twister.read() is not twister.read()


@KINDS
def test_without_an_address_the_generator_is_asked(kind: Kind) -> None:
    twister: Any = kind.make()
    twister.address = lambda: None
    before = twister.read()
    first = kind.drawn(["uniform", "order"])
    twister.write(before)
    assert kind.drawn(["uniform", "order"]) == first


@KINDS
def test_only_a_few_states_are_remembered(kind: Kind) -> None:
    twister = kind.make()
    kind.seed(0)
    first = twister.read()
    for seed in range(1, MOST_REMEMBERED + 1):
        kind.seed(seed)
        twister.read()
    kind.seed(0)
    assert twister.read() is not first
    twister.write(first)
    assert equal(twister.get(), first)


@pytest.mark.filterwarnings("ignore:get_state and legacy")
def test_another_kind_of_generator_is_left_to_numpy() -> None:
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        twister = NumpyTwister(np.random)
        before = twister.read()
        first = np.random.rand()
        twister.write(before)
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(usual)


def test_a_numpy_that_does_not_tell_where_its_words_lie_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(np.random, "get_bit_generator")
    assert NumpyTwister(np.random).address() is None


def test_python_and_numpy_are_read_in_memory_here() -> None:
    for kind in (PYTHON, NUMPY):
        kind.seed(0)
        twister = kind.make()
        assert twister.read() is twister.read()
