"""A stream of chance: apart from everything outside it."""

import random

import numpy
import torch

from lockstep.chance import Stream


def draws() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(numpy.random.rand())]


def test_a_stream_goes_on_where_it_stopped() -> None:
    whole, parts = Stream(7), Stream(7)
    with whole.drawing():
        expected = [draws(), draws()]
    drawn = []
    for _ in range(2):
        draws()
        with parts.drawing():
            drawn.append(draws())
    assert drawn == expected


def test_outside_a_stream_nothing_is_drawn() -> None:
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    untouched = draws()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    with Stream(7).drawing():
        draws()
    assert draws() == untouched


def test_a_generator_of_the_streams_own_starts_from_its_key_and_is_put_back() -> None:
    own = torch.Generator().manual_seed(1)
    stream = Stream(7, [own])
    drawn = []
    for _ in range(2):
        with stream.drawing():
            drawn.append(torch.rand(2, generator=own))
    assert torch.equal(torch.cat(drawn), torch.rand(4, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(own.get_state(), torch.Generator().manual_seed(1).get_state())
