"""Plain values in the attributes of models and optimizers, which no `state_dict` has.

# Note [Attributes that training changes]
# A temperature, the rate of a dropout layer, the number of updates, a switch that is set in epoch 3: scripts keep such
# values in attributes of a module, of the settings that it holds, or of an optimizer of their own, and change them as
# training goes on. A new process begins with the first ones, and nothing would show it: a worker that joins would
# compute its lanes with them, and so would a run that is resumed. So a snapshot has the numbers, truth values and words
# that have changed since training began, and they are put back when it is loaded. Only then: a script that computes a
# value anew in every turn is not disturbed. A snapshot that is taken in an evaluation, which may have set switches for
# a while, has those of the last training loop. One that has its first value again when training goes on was set since,
# below `run.replicate` or at the top of an epoch. If the script's code goes on from it (`self.tau *= 0.9`), that is
# wrong, and it is refused; but at the start of a pass over a loader, what the source sets before each pass is as it
# should be. What no code goes on from may be computed: a note names it.
#
# A method may store such a value together with something that no snapshot has: `self.size = n` and `self.table =
# zeros(n)`. One without the other would be worse than neither, so the value is not put back. If the method is part of
# the forward pass, it is a cache, and is made again; else the script is refused where the value has its first one
# again.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from lockstep.script.owners import PLAIN, are_settings, carried_attributes, is_torchs, own_methods
from lockstep.script.restart.difference import Difference
from lockstep.script.source.methods import Method
from lockstep.state.models import Models
from lockstep.state.snapshot import Json, pack, unpack

Plain = int | float | bool | str | None
Pairs = dict[str, tuple[Plain, Plain]]

SET_AGAIN = (
    "What the script sets in one epoch, or before one step, is not set after a resume: set it in every epoch "
    "(`if epoch >= 3`), or from run.step."
)


def renewed(name: str, value: Plain, before: Plain, *, goes_on: bool, was_put_back: bool = True) -> Difference:
    """An attribute that has its first value again, although training had changed it. If the script's code `goes_on`
    from it, it is not computed anew."""
    words = f"{name} is {value!r} and was {before!r} when the snapshot was taken"
    if not was_put_back:
        return Difference(f"{words}. {SET_AGAIN}", is_wrong=True)
    return Difference(
        f"{words}: it was put back, and the script has set it anew. Compute it from run.step, or set it above "
        "run.replicate only.",
        is_wrong=goes_on,
    )


class ModelAttributes:
    """See Note [Attributes that training changes]."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._first: dict[str, Plain] | None = None
        """The values with which training began, in this process or in the one of the snapshot."""
        self._loaded: Pairs = {}
        """The first value and that of the snapshot, until training goes on."""
        self._bound: Pairs = {}
        """The same, of those that are not put back."""
        self._switches: list[tuple[str, dict[Any, Any], str]] | None = None
        """Where truth values and words stood when a pass began; looking for them in every step would cost too much."""
        self._in_training: list[Plain] = []
        """What they were when the last training loop began."""

    def begin(self, *, at_start: bool) -> list[Difference]:
        """A training loop begins, at the start of a pass or within one. Returns what has its first value again after a
        resume and should not."""
        if at_start or self._switches is None:
            places = [(name, _table(holder), key) for name, holder, key in self._places()]
            self._switches = [place for place in places if type(place[1][place[2]]) in (bool, str)]
        self._in_training = [table.get(key) for _, table, key in self._switches]
        loaded, self._loaded, bound, self._bound = self._loaded, {}, self._bound, {}
        if not loaded and not bound:
            return []
        now = self._now()
        again, bound = _with_first(loaded, now), _with_first(bound, now)
        carried = self._carried(over_passes=at_start) if again else set()
        meant = self._carried(over_passes=False) - carried if again else set()
        found = [renewed(name, *pair, goes_on=name in carried) for name, pair in again.items() if name not in meant]
        return found + [renewed(name, *pair, goes_on=False, was_put_back=False) for name, pair in bound.items()]

    def note_first(self) -> None:
        """The script begins to train: what changes from now on is in a snapshot."""
        self._first = self._now() | {name: first for name, (first, _) in (self._loaded | self._bound).items()}

    def changed(self, *, in_evaluation: bool) -> tuple[Json, Json]:
        """The part of a snapshot, the first value and that of now by name: those to put back, and those to compare."""
        first, to_put_back, to_compare = self._first or {}, {}, {}
        before = zip(self._switches or (), self._in_training, strict=True) if in_evaluation else ()
        in_training = {name: value for (name, _, _), value in before}
        for name, holder, key in self._places():
            now = in_training.get(name, _table(holder)[key])
            if name in first and not _same(first[name], now):
                methods = _that_store_more(holder, key)
                pair = [pack(first[name], name, {}), pack(now, name, {})]
                if not methods:
                    to_put_back[name] = pair
                elif not any(method.is_inner for method in methods):
                    to_compare[name] = pair
        return to_put_back, to_compare

    def load(self, put_back: Mapping[str, Json], compared: Mapping[str, Json]) -> None:
        """Puts the values of a snapshot back, and remembers those that are only compared."""
        self._loaded, self._bound = _unpacked(put_back), _unpacked(compared)
        pairs = (self._loaded | self._bound).items()
        self._first = None if self._first is None else self._first | {name: first for name, (first, _) in pairs}
        for name, holder, key in self._places():
            if name in self._loaded:
                _set(holder, key, self._loaded[name][1])

    def _now(self) -> dict[str, Plain]:
        return {name: _table(holder)[key] for name, holder, key in self._places()}

    def _carried(self, *, over_passes: bool) -> set[str]:
        places = [place for place in self._places() if not isinstance(place[1], dict)]
        return {name for name, holder, key in places if key in carried_attributes(holder, over_passes=over_passes)}

    def _places(self) -> Iterator[tuple[str, Any, str]]:
        """Every plain value in an attribute, and in settings that are one: its name, who holds it, and its key."""
        for label, model in self._models.modules.items():
            for path, module in model.named_modules():
                yield from _places_in(module, name_of_module(label, path), _attributes_of_module())
        for label, optimizer in self._models.optimizers.items():
            if not is_torchs(optimizer):
                yield from _places_in(optimizer, label, _attributes_of_optimizer())


def _that_store_more(holder: Any, key: str) -> list[Method]:
    """The methods of the holder that store the attribute together with something that no snapshot has."""
    unsaved = {name for name, value in _table(holder).items() if type(value) not in PLAIN}
    storing = [method for method in own_methods(holder) if key in method.stores]
    return [method for method in storing if method.registers or method.stores & unsaved]


def _with_first(pairs: Pairs, now: Mapping[str, Plain]) -> Pairs:
    return {name: pair for name, pair in pairs.items() if name in now and _same(now[name], pair[0])}


def _unpacked(saved: Mapping[str, Json]) -> Pairs:
    return {name: (unpack(first, {}), unpack(now, {})) for name, (first, now) in saved.items()}


def name_of_module(label: str, path: str) -> str:
    """The same whether it is compiled or not."""
    return f"{label}.{path}".replace("_orig_mod.", "").removesuffix("._orig_mod").rstrip(".")


def _places_in(holder: Any, name: str, of_torch: frozenset[str], depth: int = 1) -> Iterator[tuple[str, Any, str]]:
    is_hidden = is_torchs(holder)
    for key, value in list(_table(holder).items()):
        if not isinstance(key, str) or key in of_torch or (is_hidden and key.startswith("_")):
            continue
        if type(value) in PLAIN:
            yield f"{name}.{key}", holder, key
        elif depth > 0 and are_settings(value):
            yield from _places_in(value, f"{name}.{key}", frozenset(), depth - 1)


def _table(holder: Any) -> dict[Any, Any]:
    return holder if isinstance(holder, dict) else vars(holder)


def _set(holder: Any, key: str, value: Plain) -> None:
    if isinstance(holder, dict):
        holder[key] = value
    else:
        setattr(holder, key, value)


def _same(one: Plain, other: Plain) -> bool:
    return repr(one) == repr(other)


@cache
def _attributes_of_module() -> frozenset[str]:
    return frozenset(vars(nn.Module()))


@cache
def _attributes_of_optimizer() -> frozenset[str]:
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"_opt_called"}
