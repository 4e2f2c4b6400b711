"""Numbers in the attributes of models and optimizers, which no `state_dict` has.

# Note [Attributes that training changes]
# A temperature, the rate of a dropout layer, the number of updates: scripts keep such numbers in attributes of a
# module, or of an optimizer of their own, and change them as training goes on. A new process begins with the first
# ones, and nothing would show it: a worker that joins would compute its lanes with them, and so would a run that is
# resumed. So a snapshot has the numbers that have changed since training began, and they are put back when it is
# loaded. Only then: a script that computes a number anew in every turn is not disturbed. One that has its first value
# again when training goes on was set since, below `run.replicate` or at the top of an epoch. If the script's code goes
# on from it (`self.tau *= 0.9`), that is wrong, and it is refused; but at the start of a pass over a loader, what the
# source sets before each pass is as it should be. What no code goes on from may be computed: a note names it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from lockstep.script.owners import carried_attributes, is_torchs
from lockstep.state.models import Models
from lockstep.state.snapshot import Json, pack, unpack

Number = int | float | None


@dataclass(frozen=True)
class Renewed:
    """An attribute that has its first value again, although training had changed it."""

    name: str
    value: Number
    before: Number
    goes_on: bool
    """Whether the script's code goes on from it: then it is not computed anew."""

    def __str__(self) -> str:
        return (
            f"{self.name} is {self.value} and was {self.before} when the snapshot was taken: it was put back, and the "
            "script has set it anew. Compute it from run.step, or set it above run.replicate only."
        )


class ModelAttributes:
    """See Note [Attributes that training changes]."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._first: dict[str, Number] | None = None
        """The numbers with which training began, in this process or in the one of the snapshot."""
        self._loaded: dict[str, tuple[Number, Number]] = {}
        """The first number and that of the snapshot, until training goes on."""

    def begin(self, *, at_start: bool) -> list[Renewed]:
        """Training is about to begin, or to go on, at the start of a pass or within one. Returns what has its first
        value again and should not."""
        loaded, self._loaded = self._loaded, {}
        if self._first is not None and not loaded:
            return []
        now = self._now()
        self._first = now | {name: first for name, (first, _) in loaded.items()} if self._first is None else self._first
        renewed = {name: pair for name, pair in loaded.items() if name in now and _same(now[name], pair[0])}
        carried = self._carried(over_passes=at_start) if renewed else set()
        meant = self._carried(over_passes=False) - carried if renewed else set()
        return [Renewed(name, *pair, name in carried) for name, pair in renewed.items() if name not in meant]

    def changed(self) -> Json:
        """The part of a snapshot: the first number and that of now, by name."""
        first = self._first or {}
        pairs = [(name, first[name], now) for name, now in self._now().items() if name in first]
        return {name: [pack(one, name, {}), pack(now, name, {})] for name, one, now in pairs if not _same(one, now)}

    def load(self, saved: Mapping[str, Json]) -> None:
        """Puts the numbers of a snapshot back."""
        self._loaded = {name: (unpack(first, {}), unpack(now, {})) for name, (first, now) in saved.items()}
        self._first = None if self._first is None else self._first | {n: one for n, (one, _) in self._loaded.items()}
        for name, holder, key in self._places():
            if name in self._loaded:
                setattr(holder, key, self._loaded[name][1])

    def _now(self) -> dict[str, Number]:
        return {name: getattr(holder, key) for name, holder, key in self._places()}

    def _carried(self, *, over_passes: bool) -> set[str]:
        places = self._places()
        return {name for name, holder, key in places if key in carried_attributes(holder, over_passes=over_passes)}

    def _places(self) -> Iterator[tuple[str, Any, str]]:
        """Every number in an attribute: its name, who holds it, and the attribute."""
        for label, model in self._models.modules.items():
            for path, module in model.named_modules():
                holder = f"{label}.{path}".replace("_orig_mod.", "").removesuffix("._orig_mod").rstrip(".")
                yield from ((f"{holder}.{key}", module, key) for key in _numbers(module, _attributes_of_module()))
        for label, optimizer in self._models.optimizers.items():
            if not is_torchs(optimizer):
                yield from (
                    (f"{label}.{key}", optimizer, key) for key in _numbers(optimizer, _attributes_of_optimizer())
                )


def _numbers(holder: Any, of_torch: frozenset[str]) -> list[str]:
    is_hidden = is_torchs(holder)
    return [
        key
        for key, value in vars(holder).items()
        if type(value) in (int, float, type(None)) and key not in of_torch and not (is_hidden and key.startswith("_"))
    ]


def _same(one: Number, other: Number) -> bool:
    return repr(one) == repr(other)


@cache
def _attributes_of_module() -> frozenset[str]:
    return frozenset(vars(nn.Module()))


@cache
def _attributes_of_optimizer() -> frozenset[str]:
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"_opt_called"}
