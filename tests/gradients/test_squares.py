"""Squares of gradients do not depend on how parameters are cut into buckets, or in which order these fill."""

import torch

from lockstep.gradients.squares import Squares

SIZES = (1e8, 1.0, 1.0)  # 1e16 + 1 + 1 and 1 + 1 + 1e16 are two different sums


def test_a_lane_has_the_same_square_whatever_the_order_of_its_buckets() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in SIZES]
    gradients = {index: torch.tensor([size]) for index, size in enumerate(SIZES)}
    found = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        squares = Squares(parameters, lambda parameter, gradient: gradient.double().square().sum())
        for index in order:
            squares.look(0, {index: gradients[index]})
        found.append((squares.of_lanes(1), squares.whole({index: gradients[index]} for index in order)))
    assert found == [found[0]] * 3
