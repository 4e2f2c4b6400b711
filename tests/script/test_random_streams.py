"""Who may have a generator outside of lanes to itself."""

import random

import torch

from lockstep.chance import Generators
from lockstep.script.random_streams import Streams, fact_name, tolerated

TORCH = fact_name("torch")


def _worker(slot: int, *, draws: int = 0, owners: dict[str, int] | None = None) -> dict[str, str]:
    """What a worker says that has drawn so often since its last step began."""
    streams = Streams()
    streams.owners = owners or {}
    torch.manual_seed(0)
    streams.look(Generators.now())
    if draws:
        torch.rand(draws)
    streams.look(Generators.now())
    return {**streams.facts(slot), **streams.details(slot)}


def test_equal_workers_say_the_same() -> None:
    assert _worker(0)[TORCH] == _worker(1)[TORCH]
    assert _worker(0, draws=3)[TORCH] == _worker(1, draws=3)[TORCH]


def test_a_worker_that_drew_alone_has_the_generator_to_itself() -> None:
    everyone = [_worker(0, draws=2), _worker(1), _worker(2)]
    assert tolerated(everyone, {}) == {"torch": 0}


def test_two_that_drew_different_numbers_are_not_tolerated() -> None:
    assert tolerated([_worker(0, draws=2), _worker(1, draws=1)], {}) is None


def test_once_one_has_it_to_itself_it_may_draw_and_nobody_else() -> None:
    owners = {"torch": 0}
    assert _worker(0, draws=5, owners=owners)[TORCH] == _worker(1, owners=owners)[TORCH]
    drawn = [_worker(0, owners=owners), _worker(1, draws=1, owners=owners)]
    assert drawn[0][TORCH] != drawn[1][TORCH]
    assert tolerated(drawn, owners) is None


def test_when_the_owner_is_gone_another_may_take_its_place() -> None:
    owners = {"torch": 0}
    assert tolerated([_worker(1, draws=1, owners=owners), _worker(2, owners=owners)], owners) == {"torch": 1}


def test_every_kind_of_generator_is_looked_at() -> None:
    before, streams = random.getstate(), Streams()
    streams.look(Generators.now())
    first = streams.facts(0)
    random.random()
    streams.look(Generators.now())
    assert first[fact_name("Python")] != streams.facts(0)[fact_name("Python")]
    assert first[TORCH] == streams.facts(0)[TORCH]
    random.setstate(before)
