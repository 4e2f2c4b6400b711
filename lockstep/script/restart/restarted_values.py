"""Values of a script that are other ones than in the snapshot: whether that is wrong, and what is said of it.

See Note [Values of the script] in values.py.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from lockstep.script.call_site import Site
from lockstep.script.restart.texts import GENERATOR, OF_ARRAYS, PARAMETERS, TENSORS
from lockstep.script.source.dependence import Dependence, dependence
from lockstep.script.source.first_reads import is_carried, is_set_before_passes
from lockstep.script.source.functions import Function, function_at

Values = Mapping[tuple[str, str], Mapping[str, str]]
"""Values as text by their names, for each function, or class of attributes: `(path, function)`."""

_MOVES = ("an iterator with", "a generator at", "count(")
"""How the texts of iterators begin: they are never twice the same."""
HELD = ".held"
"""Behind the name of a function: the attributes of the objects in its variables."""
OBJECT = "()"
"""Behind the name of a class: the attributes of an object that a variable holds, whose methods are none of the calls
under way."""
STORED = "stored: "
"""Before the text of an attribute that a method sets."""
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
        source = None if path is None else function_at(path, function.removesuffix(OBJECT))
        if path is None or value is None or source is None or function.endswith(HELD):
            continue
        one = _Restarted(source, name, value, text, is_of_object=function.endswith(OBJECT))
        if value == text and not one.has_moved_on((first or {}).get((path, function), {})):
            continue
        held = f"{function}{HELD}"
        unchanged = _unchanged(one.variable, now.get((path, held), {}), before.get((file, held), {}))
        changed = one.judged(file, unchanged, at_start=at_start, has_joined=has_joined)
        found += [] if changed is None else [changed]
    return found


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
    stored = {attribute[part] for part in own if texts[part].startswith(STORED)}
    return set(attribute.values()) - changed - stored if changed else set()
