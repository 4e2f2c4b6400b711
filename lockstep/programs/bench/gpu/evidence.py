"""What a side computed, measured: its gradients and how far its parameters went, and how another side's compare."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from lockstep.gradients.fingerprint import combined, fingerprints
from lockstep.programs.bench.gpu.sides import Side
from lockstep.state.tensor_file import write_tensors

NUM_STEPS = 3

Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class Evidence:
    """By parameter: how far it went, and its gradients, the mean that AdamW keeps of them."""

    movement: Named
    gradients: Named

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of it under names that `of` takes apart again."""
        parts = {"movement": self.movement, "gradients": self.gradients}
        return {f"{part} {name}": value for part, named in parts.items() for name, value in named.items()}

    @classmethod
    def of(cls, tensors: Named) -> "Evidence":
        parts: dict[str, dict[str, Tensor]] = {"movement": {}, "gradients": {}}
        for key, value in tensors.items():
            part, _, name = key.partition(" ")
            parts[part][name] = value
        return cls(**parts)


def train_anew(side: Side) -> Evidence:
    """What the side computes in NUM_STEPS steps from the initial weights. Collective."""
    side.restart()
    for number in range(NUM_STEPS):
        side.step(number)
    return Evidence(side.movement(), side.mean_gradients())


def write(evidence: Evidence, path: Path) -> None:
    write_tensors(path, evidence.tensors)


def read(path: Path) -> Evidence:
    return Evidence.of(load_file(str(path)))


def compare(evidence: Evidence, wanted: Evidence) -> dict[str, float]:
    """`gradients` and `movement`: how far apart they are, by the length of the wanted ones; `length`: of the movement.

    `length` is a quotient, 1 for equal ones. All are infinite where a parameter is missing or a number not finite.
    """
    movement, length = _apart(evidence.movement, wanted.movement)
    return {"gradients": _apart(evidence.gradients, wanted.gradients)[0], "movement": movement, "length": length}


def digest(evidence: Evidence) -> str:
    """A fingerprint of the bits of all of it. It is made where the tensors are: they may be a gigabyte on a GPU."""
    return combined(fingerprints(evidence.tensors)).hex()


def _apart(found: Named, wanted: Named) -> tuple[float, float]:
    """‖found − wanted‖ / ‖wanted‖ and ‖found‖ / ‖wanted‖ over all parameters, added up in float64."""
    if found.keys() != wanted.keys():
        return math.inf, math.inf
    apart = own = other = 0.0
    for name, value in found.items():
        mine, theirs = value.double(), wanted[name].to(value.device).double()
        apart += float((mine - theirs).square().sum())
        own += float(mine.square().sum())
        other += float(theirs.square().sum())
    if not other or not math.isfinite(apart + own + other):
        return math.inf, math.inf
    return math.sqrt(apart / other), math.sqrt(own / other)
