"""A pass that begins anywhere gives the samples that it gave before, whatever sampler the user has; or it is said."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from noisy_data import Noisy, NoisyStream, assert_same_bits, passes, sharded, told_apart
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from lockstep.data import Position, ShardedLoader
from lockstep.data import passes as passes_module
from lockstep.errors import BadCheckpoint

SIZE, BATCH = 11, 4
STEPS = 3


class Remembering(Sampler[int]):
    """Goes on with a generator of its own from pass to pass; its seed may be left to chance."""

    def __init__(self, seed: int | None = 7, size: int = SIZE) -> None:
        self.rng = random.Random(seed)
        self.size = size

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        self.rng.shuffle(order)
        yield from order

    def __len__(self) -> int:
        return self.size


class DrawingEach(Remembering):
    """Draws while it gives."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield self.rng.randrange(self.size)


class OfEpoch(Remembering):
    """Derives its order from the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.rng = random.Random(self.epoch)
        return super().__iter__()


class Endless(Remembering):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield self.rng.randrange(self.size)

    __len__ = None  # type: ignore[assignment]


class Saved(Remembering):
    """Has a state_dict, as one that is given to run.replicate must have."""

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.setstate(state["rng"])


class SavedEndless(Saved, Endless):
    pass


class Batches(Sampler[list[int]]):
    """A batch sampler that remembers, with batches of different sizes."""

    def __init__(self) -> None:
        self.rng = random.Random(3)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(SIZE))
        self.rng.shuffle(order)
        yield from (order[:2], order[2:7], order[7:])

    def __len__(self) -> int:
        return STEPS


def by(sampler: Any, batch_size: int = BATCH, size: int = SIZE) -> "DataLoader[Any]":
    return DataLoader(Noisy(size), batch_size, sampler=sampler)


LOADERS: dict[str, Callable[[], "DataLoader[Any]"]] = {
    "in order": lambda: DataLoader(Noisy(SIZE), BATCH),
    "shuffled": lambda: DataLoader(Noisy(SIZE), BATCH, shuffle=True),
    "remembering": lambda: by(Remembering()),
    "drawing each": lambda: by(DrawingEach()),
    "of the epoch": lambda: by(OfEpoch()),
    "saved": lambda: by(Saved()),
    "own batches": lambda: DataLoader(Noisy(SIZE), batch_sampler=Batches()),
    "torch's batches of own samples": lambda: DataLoader(
        Noisy(SIZE), batch_sampler=BatchSampler(Remembering(), BATCH, False)
    ),
    "whole": lambda: DataLoader(Noisy(SIZE), None, sampler=Remembering()),
    "a stream": lambda: DataLoader(NoisyStream(SIZE), BATCH),
    "loading processes": lambda: DataLoader(Noisy(SIZE), BATCH, sampler=Remembering(), num_workers=1),
}


def run_to(loader: ShardedLoader, position: Position) -> ShardedLoader:
    """The loader, undisturbed, where so many passes and batches were handed out."""
    for _ in range(position.epoch):
        list(loader)
    if position.step:
        loader.kept = iter(loader)  # type: ignore[attr-defined]  # a pass ends with its iterator
    for _ in range(position.step):
        next(loader.kept)  # type: ignore[attr-defined]
    return loader


def sought(make: Callable[[], Any], position: Position, expected: str | None = None, **told: Any) -> ShardedLoader:
    """A new one that is put there."""
    loader = sharded(make(), **told)
    loader.seek(position)
    if expected is not None:
        loader.check_drawn(expected)
    return loader


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("checked", [False, True])
def test_a_pass_begun_anywhere_gives_what_an_undisturbed_loader_gives(name: str, checked: bool) -> None:
    whole = passes(sharded(LOADERS[name]()), 4)
    for place in (Position(0, 2), Position(2, 0), Position(3, 1)):
        expected = run_to(sharded(LOADERS[name]()), place)
        loader = sought(LOADERS[name], place, expected.drawn if checked else None)
        assert loader.drawn == (expected.drawn if checked else "")
        rest = told_apart(list(loader))
        assert_same_bits(rest, {key: whole[key] for key in whole if key[0] == place.epoch and key[1] >= place.step})
        expected.close()
        loader.close()


@given(st.sampled_from([name for name in LOADERS if name != "loading processes"]), st.integers(0, 3), st.integers(0, 2))
def test_what_was_drawn_is_the_same_on_every_worker_and_after_being_put_there(name: str, epoch: int, step: int) -> None:
    place = Position(epoch, step)
    undisturbed = run_to(sharded(LOADERS[name]()), place)
    other_worker = run_to(sharded(LOADERS[name](), lanes=[2]), place)
    put_there = sought(LOADERS[name], place, undisturbed.drawn, lanes=[])
    assert undisturbed.drawn == other_worker.drawn == put_there.drawn
    batch = next(iter(put_there))
    assert (batch.drawn, batch.position) == (undisturbed.drawn, place)


def test_digests_tell_orders_samples_and_uses_apart() -> None:
    def digests(indices: list[int]) -> list[str]:
        return [batch.digest for batch in sharded(by(indices, 2, 4))]

    assert digests([0, 1, 2, 3]) == digests([0, 1, 2, 3])
    assert len({*digests([0, 1, 1, 0]), *digests([2, 1, 3, 0])}) == 4
    first, second = digests([0, 1, 0, 1])
    assert first != second  # the same samples, used before
    assert digests([0, 1, 0, 1])[0] == digests([0, 1, 2, 3])[0]


def test_what_was_drawn_depends_on_the_order_and_not_on_where_batches_are_cut() -> None:
    def drawn(indices: list[int], batch_size: int, **told: Any) -> str:
        loader = sharded(by(indices, batch_size), say=lambda _: None, **told)
        list(loader)
        return loader.drawn

    order = [3, 1, 0, 2, 7, 5]
    assert drawn(order, 2) == drawn(order, 3) == drawn(order, 1, batch="grow")
    assert drawn(order, 2) != drawn(order[::-1], 2)


@pytest.mark.parametrize("indices", [["a", "b", "c"], [(0, 1), (1, 0), (2, 2)], [2**70, 1, "x"]], ids=str)
def test_indices_may_be_anything_that_reads_the_same_everywhere(indices: list[Any]) -> None:
    class Table(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: Any) -> int:
            return indices.index(index)

    def drawn(batch_size: int) -> str:
        loader = sharded(DataLoader(Table(), batch_size, sampler=indices))
        list(loader)
        return loader.drawn

    assert drawn(1) == drawn(2) == drawn(3)


def test_of_a_stream_only_the_place_is_known() -> None:
    def digest(size: int) -> tuple[str, str]:
        loader = run_to(sharded(DataLoader(NoisyStream(size), BATCH)), Position(0, 2))
        return loader.drawn, next(loader.kept).digest  # type: ignore[attr-defined]

    assert digest(SIZE) == digest(2 * SIZE)


@pytest.mark.parametrize("place", [Position(0, 2), Position(1, 0), Position(2, 1)], ids=str)
def test_a_sampler_that_gives_another_order_every_time_is_refused_by_name(place: Position) -> None:
    expected = run_to(sharded(by(Remembering(None))), place).drawn
    with pytest.raises(BadCheckpoint, match=r"^loader 5 does not give .* \(BatchSampler, Remembering\) .*set_epoch"):
        sought(lambda: by(Remembering(None)), place, expected, index=5)


def test_data_that_have_changed_are_refused_in_the_middle_of_a_pass() -> None:
    expected = run_to(sharded(DataLoader(Noisy(SIZE), BATCH, shuffle=True)), Position(1, 1)).drawn
    with pytest.raises(BadCheckpoint, match="the first 1 batches of pass 1 are others"):
        sought(lambda: DataLoader(Noisy(SIZE - 1), BATCH, shuffle=True), Position(1, 1), expected)


@pytest.mark.parametrize("kind", [Remembering, OfEpoch, DrawingEach])
def test_batches_may_be_others_between_two_passes(kind: Any) -> None:
    expected = run_to(sharded(by(kind(), 4)), Position(2, 0))
    again = sought(lambda: by(kind(), 3), Position(2, 0), expected.drawn)
    list(expected), list(again)
    assert again.drawn == expected.drawn


def test_a_loader_can_be_put_before_the_batch_under_way() -> None:
    loader = run_to(sharded(by(Remembering())), Position(2, 1))
    batch = next(loader.kept)  # type: ignore[attr-defined]
    again = next(iter(sought(lambda: by(Remembering()), batch.position, batch.drawn)))
    assert (again.digest, again.position, again.drawn) == (batch.digest, batch.position, batch.drawn)


def test_a_sampler_that_was_given_its_state_is_run_from_its_beginning_all_the_same() -> None:
    original = by(Saved())
    expected = run_to(sharded(original), Position(2, 2)).drawn
    state = original.sampler.state_dict()

    def restored() -> ShardedLoader:
        loader = sharded(by(Saved()))
        loader.sampler.load_state_dict(state)  # as run.resume does: it stands in the middle of a pass, not before it
        loader.seek(Position(2, 2))
        loader.check_drawn(expected)
        return loader

    assert restored().drawn == expected


@pytest.mark.parametrize("kind", [Saved, SavedEndless])
def test_a_sampler_that_was_given_its_state_between_two_passes_needs_no_seed_and_no_end(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes_module, "MOST_WITHOUT_LENGTH", 1000)
    original = by(kind(None))
    loader = sharded(original)
    for _ in range(2):
        for batch in loader:
            if batch.position.step == 2:
                break
    loader.seek(Position(2, 0))
    expected, state = loader.drawn, original.sampler.state_dict()
    again = sharded(by(kind(None)))
    again.sampler.load_state_dict(state)
    again.seek(Position(2, 0))
    again.check_drawn(expected)
    assert next(iter(again)).digest == next(iter(loader)).digest


@pytest.mark.parametrize("expected", [None, ""])
def test_an_endless_sampler_is_run_through_no_further_than_the_bound_and_named(
    expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes_module, "MOST_WITHOUT_LENGTH", 1000)
    said: list[str] = []
    loader = sought(lambda: by(Endless()), Position(3, 2), expected, say=said.append)
    assert next(iter(loader)).position == Position(3, 2)
    (text,) = said
    assert "BatchSampler, Endless draws from a generator of its own: from pass 0 on it gives too many samples" in text


def test_passes_that_are_too_long_all_together_are_not_even_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes_module, "MOST_SAMPLES", 3 * SIZE)
    said: list[str] = []
    for epoch, notes in ((3, 0), (4, 1)):
        next(iter(sought(lambda: by(Remembering()), Position(epoch, 0), say=said.append)))
        assert len(said) == notes
    assert "too many samples to be run through up to pass 4" in said[0]


def left_early(kind: Any, said: list[str]) -> None:
    loader = sharded(by(kind()))
    for _ in loader:
        break
    batches = iter(loader)
    next(batches)
    sought(lambda: by(kind()), Position(1, 1), loader.drawn, say=said.append)


def test_a_pass_that_was_left_early_is_said_unless_the_sampler_is_told_the_epoch() -> None:
    said: list[str] = []
    left_early(OfEpoch, said)
    assert said == []
    left_early(Remembering, said)
    assert "pass 0 was left before its end" in said[0]


def test_a_pass_that_was_left_early_by_a_sampler_that_draws_while_it_gives_is_refused() -> None:
    with pytest.raises(BadCheckpoint, match="the first 1 batches of pass 1 are others"):
        left_early(DrawingEach, [])


@given(st.text(max_size=20))
def test_what_does_not_say_what_was_drawn_is_refused(text: str) -> None:
    loader = sharded(DataLoader(Noisy(SIZE), BATCH))
    if text.split():
        with pytest.raises(BadCheckpoint, match="does not say what a loader has drawn"):
            loader.check_drawn(text)


def test_torchs_own_samplers_are_not_run_through(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    plain = RandomSampler.__iter__
    monkeypatch.setattr(RandomSampler, "__iter__", lambda self: begun.append(1) or plain(self))  # type: ignore[func-returns-value]
    next(iter(sought(lambda: DataLoader(Noisy(SIZE), BATCH, shuffle=True), Position(9, 1))))
    assert len(begun) == 1
