"""The script's own values other than whole numbers: the best loss so far, a list of losses, what an object remembers.

# Note [Values of the script]
# `best = inf`, and later `best = min(best, loss)`: a best loss starts again like a counter when the script runs from
# its top (Note [Numbers of the script] in counters.py), but its right value cannot be computed. So a snapshot has, as
# text, the plain values of the script's variables that have changed since training began: numbers, strings, and lists,
# tables and objects of the script's own classes that hold such. Of a function or a module, such as a loss, it has which
# one it is, and the attributes from which the module's code goes on. Where one of them is another after a resume, and
# the training depends on it, the script is refused. Values that never change are not compared, such as the time at
# which the script was started.
#
# An untracked average of the weights starts again too. Of tensors and NumPy's arrays, by themselves, in lists and
# tables, in modules and in objects of the script, a snapshot has a digest of some elements. Where they are others after
# a resume a note is shown. They may be memory that is written in every step, so only a name that a loop sets anew
# (`mean = 0.9 * mean + w`), or a module with other parameters (a teacher that follows), can be refused. A worker that
# joins is refused where they go into the loss: its lanes would be others than before.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.data.structure import attributes
from lockstep.script.call_site import Site, calling_frame, look_into
from lockstep.script.owners import file_of, is_of_script, own_methods
from lockstep.script.restart.restarted_values import HELD, OBJECT, STORED, Changed, Values, restarted_values
from lockstep.script.restart.texts import ELSEWHERE, TENSORS, is_object_of_script, texts_of
from lockstep.state.models import Models

_WHOLE = re.compile(r"-?\d+|True|False")


def values(frame: FrameType, models: Iterable[nn.Module] = (), kept: Iterable[Any] = ()) -> Values:
    """The plain values in the variables of the script's own calls, and in the attributes of their `self`.

    Of the `models` of the run, the numbers in attributes are left out: they are put back (see attributes.py). Of other
    objects of the script than those that the run has `kept`, attributes are looked at by themselves too.
    """
    known = {id(one) for one in kept}
    put_back = known | {id(module) for model in models for module in model.modules()}
    found = look_into(frame, partial(texts_of, put_back=put_back))
    held = look_into(frame, partial(_by_object, put_back=put_back))
    found |= {(path, f"{function}{HELD}"): texts for (path, function), texts in held.items() if texts}
    for objects in look_into(frame, _objects).values():
        for one in objects:
            place = file_of(type(one)) or "", f"{type(one).__name__}{OBJECT}"
            if id(one) not in known and place not in found:
                found[place] = texts_of(attributes(one), put_back)
    return found


def _by_object(variables: Mapping[str, Any], put_back: Collection[int]) -> dict[str, str]:
    """The attributes of objects of the script, as `object.attribute`: which of them have changed.

    Those whose state is saved in other ways are as they were, whatever they hold. What a method stores is marked: it
    may follow from another attribute that has changed.
    """
    found: dict[str, str] = {}
    for name, one in variables.items():
        if name != "self" and is_object_of_script(one):
            own = attributes(one)
            stored = {key for method in own_methods(one) for key in method.stores}
            texts = texts_of(own, put_back)
            texts = {k: f"{STORED if k.removeprefix(TENSORS) in stored else ''}{text}" for k, text in texts.items()}
            texts |= {key: type(value).__qualname__ for key, value in own.items() if _is_elsewhere(value)}
            found |= {f"{name}.{key}": text for key, text in texts.items()}
    return found


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, ELSEWHERE) or type(value).__module__.startswith("lockstep.")


def _objects(variables: Mapping[str, Any]) -> list[Any]:
    """Those of the script's own classes, optimizers among them."""
    kinds = (nn.Module, Dataset, Sampler, DataLoader, type)
    held = [one for name, one in variables.items() if name != "self" and attributes(one)]
    return [one for one in held if not isinstance(one, kinds) and is_of_script(type(one))]


def changed_since(first: Values, now: Values) -> list[list[str]]:
    """The values that are other ones now, as a snapshot holds them: file, function, name, value.

    Whole numbers in variables, and in attributes of a `self`, are left to counters.py, unless they were none at first.
    """
    return [
        [Site(path, 0).file, function, name, text]
        for (path, function), texts in now.items()
        for name, text in texts.items()
        if (before := first.get((path, function), {}).get(name)) != text
        and (
            function.endswith((HELD, OBJECT))
            or "." in name
            or not (_WHOLE.fullmatch(text) and _WHOLE.fullmatch(before or text))
        )
    ]


class ScriptValues:
    """The script's values before it trained, and those of a snapshot. See Note [Values of the script]."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._first: Values | None = None
        self._saved: list[tuple[str, str, str, str]] = []
        """Those of the snapshot, until training goes on."""

    def note_first(self) -> None:
        """The script begins to train: what changes from now on is in a snapshot."""
        self._first = self._now()

    def begin(self, *, at_start: bool, has_joined: bool, in_later_epoch: bool) -> list[Changed]:
        """A training loop begins, at the start of a pass or within one. Returns what starts again after a resume."""
        saved, self._saved = self._saved, []
        first = self._first if at_start and in_later_epoch and not has_joined else None
        now = self._now() if saved else {}
        return restarted_values(saved, now, at_start=at_start, has_joined=has_joined, first=first)

    def state(self) -> list[list[str]]:
        """Its part of a snapshot."""
        return [] if self._first is None else changed_since(self._first, self._now())

    def load(self, saved: Iterable[Sequence[str]]) -> None:
        self._saved = [(file, function, name, text) for file, function, name, text in saved]

    def _now(self) -> Values:
        kept = [*self._models.optimizers.values(), *self._models.tracked.values()]
        return values(calling_frame(), self._models.modules.values(), kept)
