"""Starts, gradients and settings on which LARS and LAMB are compared, in this process and in one that has optax."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SHAPES = [(7, 5), (3, 2, 4), (11,), ()]
NUM_STEPS = 50

LARS_SETTINGS = {"weight_decay": 0.05, "momentum": 0.8, "trust_coefficient": 0.02, "eps": 1e-3}
LAMB_SETTINGS = {"eps": 1e-3, "weight_decay": 0.05}
# By name: optax's optimizer, and its settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lars": ("lars", {**LARS_SETTINGS, "learning_rate": 0.3}),
    "lars with nesterov": ("lars", {**LARS_SETTINGS, "learning_rate": 0.3, "nesterov": True}),
    "lars without decay": ("lars", {"learning_rate": 0.3, "eps": 1e-8}),
    "lamb": ("lamb", {**LAMB_SETTINGS, "learning_rate": 0.01, "b1": 0.8, "b2": 0.95}),
    "lamb without decay": ("lamb", {"learning_rate": 0.01}),
}


def start(seed: int) -> list[Array]:
    """A parameter of every shape."""
    chance = np.random.default_rng(1000 + seed)
    return [np.asarray(chance.standard_normal(shape)) for shape in SHAPES]


def gradients(seed: int, count: int) -> Iterator[list[Array]]:
    """For every step a gradient of every shape, of sizes far apart."""
    chance = np.random.default_rng(seed)
    for _ in range(count):
        yield [np.asarray(chance.standard_normal(shape)) * 10.0 ** chance.integers(-3, 3) for shape in SHAPES]


def assert_close(found: list[Array], wanted: list[Array], rtol: float = 1e-12) -> None:
    """Every element agrees, relative to itself or to the largest of its tensor."""
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * float(np.abs(other).max()))
