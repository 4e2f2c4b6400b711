"""Keys and generators."""

import random

import numpy as np
import torch

from lockstep.chance import Generators, drawing_from, fold, set_generators


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), np.random.rand()


def test_equal_keys_draw_equal_numbers_from_every_generator() -> None:
    set_generators(fold(1, "lane", 2, 3))
    first = draws()
    draws()
    set_generators(fold(1, "lane", 2, 3))
    assert draws() == first


def test_every_part_of_a_key_matters() -> None:
    keys = {
        fold(1, "lane", 2, 3),
        fold(2, "lane", 2, 3),
        fold(1, "other", 2, 3),
        fold(1, "lane", 3, 2),
        fold(1, "lane", 23),
    }
    assert len(keys) == 5


def test_drawing_from_a_key_does_not_disturb_the_streams_outside() -> None:
    before = Generators.now()
    undisturbed = draws()
    before.restore()
    with drawing_from(7):
        draws()
    assert draws() == undisturbed
