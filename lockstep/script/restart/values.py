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
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.data.structure import attributes
from lockstep.script.call_site import Site, calling_frame, look_into
from lockstep.script.owners import file_of, is_of_script, own_methods
from lockstep.script.restart.texts import (
    ELSEWHERE,
    GENERATOR,
    OF_ARRAYS,
    PARAMETERS,
    TENSORS,
    is_object_of_script,
    texts_of,
)
from lockstep.script.source.dependence import Dependence, dependence
from lockstep.script.source.first_reads import is_carried, is_set_before_passes
from lockstep.script.source.functions import Function, function_at
from lockstep.state.models import Models

Values = Mapping[tuple[str, str], Mapping[str, str]]
"""Values as text by their names, for each function, or class of attributes: `(path, function)`."""

_MOVES = ("an iterator with", "a generator at", "count(")
"""How the texts of iterators begin: they are never twice the same."""
_HELD = ".held"
"""Behind the name of a function: the attributes of the objects in its variables."""
_OBJECT = "()"
"""Behind the name of a class: the attributes of an object that a variable holds, whose methods are none of the calls
under way."""
_STORED = "stored: "
"""Before the text of an attribute that a method sets."""
_WHOLE = re.compile(r"-?\d+|True|False")
_NUMBER = re.compile(r"-?(\d[\d.e+-]*|inf)")


@dataclass(frozen=True)
class Changed:
    """A value that is another one than when the snapshot was taken.

    `depends` is where the training depends on it; None where the source does not show that. What is drawn from a random
    generator is no number of the loop: where the source shows nothing, that is said in a note.
    """

    file: str
    name: str
    value: str
    before: str
    depends: Dependence | None
    is_wrong: bool = True
    """Whether it cannot be meant so. Tensors may be memory that is written in every step."""

    @property
    def may_join(self) -> bool:
        """Whether a worker that joins may go on with it: no generator, and nothing that the training depends on."""
        return self.depends is None and not self.is_generator

    @property
    def is_of_tensors(self) -> bool:
        return self.name.startswith(TENSORS)

    @property
    def is_module(self) -> bool:
        return self.before.startswith(PARAMETERS)

    @property
    def is_generator(self) -> bool:
        return self.value.startswith(GENERATOR)

    def __str__(self) -> str:
        name = self.name.removeprefix(TENSORS)
        if self.is_generator:
            words = (
                f"the random generator `{name}` ({self.file}) had been drawn from in training, and begins anew: "
                "nothing saves it."
            )
        elif self.is_of_tensors:
            kind = "arrays" if self.before.startswith(OF_ARRAYS) else "tensors"
            words = f"{kind} in `{name}` ({self.file}) had changed in training, and begin anew: nothing saves them."
        elif self.value == self.before:
            words = (
                f"`{self.name}` ({self.file}) begins anew, and has come to {self.value} once more, which it was when "
                "the snapshot was taken."
            )
        else:
            words = f"`{self.name}` ({self.file}) is {self.value} and was {self.before} when the snapshot was taken."
        subject = f"`{name}`" if self.is_of_tensors else "It"
        return (
            words
            if self.depends is None
            else f"{words} {subject} {self.depends.how} ({self.file}:{self.depends.line})."
        )


def values(frame: FrameType, models: Iterable[nn.Module] = (), kept: Iterable[Any] = ()) -> Values:
    """The plain values in the variables of the script's own calls, and in the attributes of their `self`.

    Of the `models` of the run, the numbers in attributes are left out: they are put back (see attributes.py). Of other
    objects of the script than those that the run has `kept`, attributes are looked at by themselves too.
    """
    known = {id(one) for one in kept}
    put_back = known | {id(module) for model in models for module in model.modules()}
    found = look_into(frame, partial(texts_of, put_back=put_back))
    held = look_into(frame, partial(_by_object, put_back=put_back))
    found |= {(path, f"{function}{_HELD}"): texts for (path, function), texts in held.items() if texts}
    for objects in look_into(frame, _objects).values():
        for one in objects:
            place = file_of(type(one)) or "", f"{type(one).__name__}{_OBJECT}"
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
            texts = {k: f"{_STORED if k.removeprefix(TENSORS) in stored else ''}{text}" for k, text in texts.items()}
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
            function.endswith((_HELD, _OBJECT))
            or "." in name
            or not (_WHOLE.fullmatch(text) and _WHOLE.fullmatch(before or text))
        )
    ]


def restarted_values(
    saved: Iterable[tuple[str, str, str, str]],
    now: Values,
    *,
    at_start: bool,
    has_joined: bool = False,
    first: Values | None = None,
) -> list[Changed]:
    """The values of a snapshot that are other ones `now`: tensors, and others on which the training depends.

    `at_start`: a pass over a loader begins, and what the script sets before each of them is as it should be, unless it
    `has_joined`: then the snapshot was taken behind that. `first` are the values before the epoch, where an epoch was
    over when the snapshot was taken: what has come from them to the value of the snapshot by a step of its own would be
    one step further.
    """
    here = {(Site(path, 0).file, function): path for path, function in now}
    saved = list(saved)
    before: dict[tuple[str, str], dict[str, str]] = {}
    for file, function, name, text in saved:
        before.setdefault((file, function), {})[name] = text
    found = []
    for file, function, name, text in saved:
        path = here.get((file, function))
        texts = {} if path is None else now[path, function]
        value = texts.get(name, texts.get(name.removeprefix(TENSORS)))  # where tensors were, there may be None
        source = None if path is None else function_at(path, function.removesuffix(_OBJECT))
        if path is None or value is None or source is None or function.endswith(_HELD):
            continue
        one = _Restarted(source, name, value, text, is_of_object=function.endswith(_OBJECT))
        if value == text and not one.has_moved_on((first or {}).get((path, function), {})):
            continue
        held = f"{function}{_HELD}"
        unchanged = _unchanged(one.variable, now.get((path, held), {}), before.get((file, held), {}))
        changed = one.judged(file, unchanged, at_start=at_start, has_joined=has_joined)
        found += [] if changed is None else [changed]
    return found


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


@dataclass(frozen=True)
class _Restarted:
    """A value that is another one than in the snapshot, or should be."""

    source: Function
    name: str
    value: str
    before: str
    is_of_object: bool
    """Whether it is in an attribute: the script calls the methods of an object in its loops."""

    @property
    def variable(self) -> str:
        return self.name.removeprefix(TENSORS)

    @property
    def is_of_tensors(self) -> bool:
        return self.variable != self.name

    def has_moved_on(self, first: Mapping[str, str]) -> bool:
        """Whether it is never twice the same, an iterator or a number that statements like `w *= 0.9` change, and was
        another one in the epoch before."""
        moves = self.value.startswith(_MOVES) or self.source.is_stepped(self.variable)
        return first.get(self.name, self.before) != self.before and moves

    def judged(self, file: str, unchanged: Collection[str], *, at_start: bool, has_joined: bool) -> Changed | None:
        """What is to be said of it; nothing where the script sets it in time, or the training does not depend on it."""
        source, variable = self.source, self.variable
        is_set = is_carried(source, variable, over_passes=at_start) or (
            (has_joined or not at_start) and not self.is_of_tensors and is_set_before_passes(source, variable)
        )
        if not is_set and (at_start or not self._may_change or not is_carried(source, variable, in_place=True)):
            return None
        is_number = not self.value.startswith(("(", "["))
        depends = dependence(source, variable, again=not self.is_of_object, in_calls=is_number, unchanged=unchanged)
        if depends is None and not (is_set and not self.is_of_object and self._is_noted):
            return None
        cannot_be = not self.is_of_tensors or source.is_set_in_loop(variable) or self._has_other_parameters
        return Changed(file, self.name, self.value, self.before, depends, depends is not None and cannot_be)

    @property
    def _may_change(self) -> bool:
        """Whether it may be changed inside: no number, word or the like."""
        return not self.value.startswith(("'", '"', "-", "None", "True", "False", "inf", "nan", *"0123456789"))

    @property
    def _is_noted(self) -> bool:
        """Whether a user hears of it although the source shows no dependence: tensors, attributes, generators, sums,
        and numbers with which others are compared. On the best accuracy so far, what is saved may depend."""
        if self.is_of_tensors or "." in self.name or self.value.startswith(GENERATOR):
            return True
        is_number = _NUMBER.fullmatch(self.before) is not None
        return is_number and (self.source.is_compared(self.name) or self.source.is_summed_up(self.name))

    @property
    def _has_other_parameters(self) -> bool:
        """Whether it is a module, with other parameters."""
        is_module = self.value.startswith(PARAMETERS) and self.before.startswith(PARAMETERS)
        return is_module and self.value.split()[1] != self.before.split()[1]


def _unchanged(name: str, texts: Mapping[str, str], before: Mapping[str, str]) -> set[str]:
    """The attributes of the object that are as they were, where others have changed.

    Those that a method sets are left out: they may follow from others. So is all of an object of which nothing is known
    to have changed: what has changed is then not among its attributes.
    """
    own = [part for part in texts if part.startswith(f"{name}.")]
    attribute = {part: part.removeprefix(f"{name}.").removeprefix(TENSORS) for part in own}
    changed = {attribute[part] for part in own if before.get(part, texts[part]) != texts[part]}
    stored = {attribute[part] for part in own if texts[part].startswith(_STORED)}
    return set(attribute.values()) - changed - stored if changed else set()
