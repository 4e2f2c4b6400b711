"""The script's own values other than whole numbers: the best loss so far, a list of losses, what an object remembers.

# Note [Values of the script]
# A best loss starts again like a counter when the script runs from the top (Note [Numbers of the script] in
# counters.py), but its right value cannot be computed: it is the one it had. So a snapshot has, as text, the plain
# values in the script's variables that have changed since training began: numbers, strings, and lists, tables and
# objects of the script's own classes that hold such; of functions and modules, as a loss, which one it is, and those
# values of a module from which its code goes on. Where one of them is another after a resume, and the training depends
# on it, the script is refused. Values that never change are not compared, such as the time at which the script was
# started.
#
# An untracked average of the weights starts again too. Of tensors and NumPy's arrays, by themselves, in lists and
# tables, in modules and in objects of the script, a snapshot has a digest of some elements. Where they are others after
# a resume a note is shown. They may be memory that is written in every step, so only a name that a loop sets anew, or
# a module with other parameters (a teacher that follows), can be refused. A worker that joins is refused where they go
# into the loss: its lanes would be others than before.
"""

import dis
import hashlib
import re
from argparse import Namespace
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from numbers import Number
from types import CodeType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.data.contents import contents
from lockstep.data.own_generators import OwnGenerator, is_own
from lockstep.data.structure import attributes, is_numpy_array
from lockstep.launch.traceback_lines import is_users
from lockstep.script.call_site import Site, look_into
from lockstep.script.owners import PLAIN, carried_attributes, file_of, is_of_script, is_torchs, own_methods
from lockstep.script.restart.data_sets import text_of
from lockstep.script.restart.iterators import is_iterator, text_of_iterator
from lockstep.script.source.dependence import Dependence, dependence
from lockstep.script.source.first_reads import is_carried, is_set_before_passes
from lockstep.script.source.functions import Function, function_at

Values = Mapping[tuple[str, str], Mapping[str, str]]
"""Values as text by their names, for each function, or class of attributes: `(path, function)`."""

_PLACED = ("an iterator with", "a generator at", "count(")
_MOST_ITEMS = 1000
_MOST_DEPTH = 3
_MOST_TEXT = 100
_TENSORS = "tensors in "
_GENERATOR = "a random generator"
_HELD = ".held"
"""Behind the name of a function: the attributes of the objects in its variables."""
_STORED = "stored: "
"""Before the text of an attribute that a method sets."""
_WHOLE = re.compile(r"-?\d+|True|False")
_NUMBER = re.compile(r"-?(\d[\d.e+-]*|inf)")
_OBJECT = "()"
"""Marks the attributes of an object that a variable holds, whose methods are none of the calls under way."""
_OF_ARRAYS = "arrays "
_PARAMETERS = "parameters "
_SAMPLED = 32
"""How many elements of a tensor are read."""

_ELSEWHERE = (nn.Module, Optimizer, Dataset, Sampler, DataLoader)
"""Types whose state is saved in other ways."""
_MANY = (list, tuple, deque, set, frozenset, dict)
_GROWING = (list, deque, set, dict)


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
        return self.name.startswith(_TENSORS)

    @property
    def is_module(self) -> bool:
        return self.before.startswith(_PARAMETERS)

    @property
    def is_generator(self) -> bool:
        return self.value.startswith(_GENERATOR)

    def __str__(self) -> str:
        name = self.name.removeprefix(_TENSORS)
        if self.is_generator:
            words = (
                f"the random generator `{name}` ({self.file}) had been drawn from in training, and begins anew: "
                "nothing saves it."
            )
        elif self.is_of_tensors:
            kind = "arrays" if self.before.startswith(_OF_ARRAYS) else "tensors"
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
    found = look_into(frame, partial(_plain_ones, put_back=put_back))
    held = look_into(frame, partial(_by_object, put_back=put_back))
    found |= {(path, f"{function}{_HELD}"): texts for (path, function), texts in held.items() if texts}
    for objects in look_into(frame, _objects).values():
        for one in objects:
            place = file_of(type(one)) or "", f"{type(one).__name__}{_OBJECT}"
            if id(one) not in known and place not in found:
                found[place] = _plain_ones(attributes(one), put_back)
    return found


def _by_object(variables: Mapping[str, Any], put_back: Collection[int]) -> dict[str, str]:
    """The attributes of objects of the script, as `object.attribute`: which of them have changed.

    Those whose state is saved in other ways are as they were, whatever they hold. What a method stores is marked: it
    may follow from another attribute that has changed.
    """
    found: dict[str, str] = {}
    for name, one in variables.items():
        if name != "self" and _is_of_the_script(one):
            own = attributes(one)
            stored = {key for method in own_methods(one) for key in method.stores}
            texts = _plain_ones(own, put_back)
            texts = {k: f"{_STORED if k.removeprefix(_TENSORS) in stored else ''}{text}" for k, text in texts.items()}
            texts |= {key: type(value).__qualname__ for key, value in own.items() if _is_elsewhere(value)}
            found |= {f"{name}.{key}": text for key, text in texts.items()}
    return found


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, _ELSEWHERE) or type(value).__module__.startswith("lockstep.")


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
    held: dict[tuple[str, str], dict[str, str]] = {}
    for file, function, name, text in saved:
        held.setdefault((file, function), {})[name] = text
    changed = []
    for file, function, name, before in saved:
        path, variable = here.get((file, function)), name.removeprefix(_TENSORS)
        texts = {} if path is None else now[path, function]
        value = texts.get(name, texts.get(variable))  # where tensors were, there may be None
        if path is None or value is None or function.endswith(_HELD):
            continue
        source = function_at(path, function.removesuffix(_OBJECT))
        has_moved = (first or {}).get((path, function), {}).get(name, before) != before
        if value == before and not (has_moved and source is not None and _moves(source, variable, value)):
            continue
        is_set = source is not None and (
            is_carried(source, variable, over_passes=at_start)
            or ((has_joined or not at_start) and variable == name and is_set_before_passes(source, variable))
        )
        if source is None or not (
            is_set or (not at_start and _may_change(value) and is_carried(source, variable, in_place=True))
        ):
            continue
        is_number = not value.startswith(("(", "["))
        again = not function.endswith(_OBJECT)  # the script calls the methods of an object in its loops
        of_objects = f"{function}{_HELD}"
        unchanged = _unchanged(variable, now.get((path, of_objects), {}), held.get((file, of_objects), {}))
        depends = dependence(source, variable, again=again, in_calls=is_number, unchanged=unchanged)
        cannot_be = variable == name or source.is_set_in_loop(variable) or _other_parameters(value, before)
        is_wrong = depends is not None and cannot_be
        is_noted = (
            is_set
            and not function.endswith(_OBJECT)
            and (
                variable != name
                or "." in name
                or value.startswith(_GENERATOR)
                or _is_limit(source, name, before)
                or (_NUMBER.fullmatch(before) is not None and source.is_summed_up(name))
            )
        )
        if depends is not None or is_noted:
            changed.append(Changed(file, name, value, before, depends, is_wrong))
    return changed


def _is_limit(source: Function, name: str, text: str) -> bool:
    """Whether it is a number with which others are compared, as the best accuracy so far: what is saved may depend on
    it."""
    return _NUMBER.fullmatch(text) is not None and source.is_compared(name)


def _moves(source: Function, name: str, text: str) -> bool:
    """Whether it is never twice the same: an iterator, or a number that statements like `w *= 0.9` change."""
    return text.startswith(_PLACED) or source.is_stepped(name)


def _unchanged(name: str, texts: Mapping[str, str], before: Mapping[str, str]) -> set[str]:
    """The attributes of the object that are as they were, where others have changed.

    Those that a method sets are left out: they may follow from others. So is all of an object of which nothing is known
    to have changed: what has changed is then not among its attributes.
    """
    own = [part for part in texts if part.startswith(f"{name}.")]
    attribute = {part: part.removeprefix(f"{name}.").removeprefix(_TENSORS) for part in own}
    changed = {attribute[part] for part in own if before.get(part, texts[part]) != texts[part]}
    stored = {attribute[part] for part in own if texts[part].startswith(_STORED)}
    return set(attribute.values()) - changed - stored if changed else set()


def _may_change(text: str) -> bool:
    """Whether it is of something that may be changed inside: of no number, word or the like."""
    return not text.startswith(("'", '"', "-", "None", "True", "False", "inf", "nan", *"0123456789"))


def _plain_ones(variables: Mapping[str, Any], put_back: Collection[int]) -> dict[str, str]:
    plain: dict[str, str] = {}
    for name, value in list(variables.items()):
        if name == "self" or name.startswith("__"):
            continue
        plain |= {f"{name}.{key}": repr(one) for key, one in _settings(value)}
        text = _text(value, _MOST_DEPTH, put_back)
        tensors = [] if id(value) in put_back else list(_tensors(value, _MOST_DEPTH))
        if text is not None:
            plain[name] = _short(text)
        if tensors:
            plain[_TENSORS + name] = _of_module(value, tensors) if isinstance(value, nn.Module) else _digest(tensors)
    return plain


def _of_module(module: nn.Module, tensors: Iterable[Any]) -> str:
    """The digest of its parameters by itself: they are no memory that is written in every step."""
    parameters = [one for one in module.parameters() if _can_be_read(one)]
    return f"{_PARAMETERS}{_digest(parameters)} {_digest(tensors)}" if parameters else _digest(tensors)


def _other_parameters(value: str, before: str) -> bool:
    """Whether they are two texts of a module's tensors, with other parameters."""
    is_module = value.startswith(_PARAMETERS) and before.startswith(_PARAMETERS)
    return is_module and value.split()[1] != before.split()[1]


def _settings(value: Any) -> Iterator[tuple[str, int | float | bool | str]]:
    """Numbers, truth values and words in arguments, in a class, or in a file of the script's own: `args.beta`,
    `Config.beta`, `config.beta`."""
    is_own_class = isinstance(value, type) and is_of_script(value)
    is_own_file = isinstance(value, ModuleType) and is_users(str(getattr(value, "__file__", None) or "<none>"))
    if is_own_class or is_own_file or isinstance(value, Namespace | SimpleNamespace):
        for name, one in list(vars(value).items()):
            if type(one) in (int, float, bool, str) and not name.startswith("__"):
                yield name, one


def _text(value: Any, depth: int, put_back: Collection[int]) -> str | None:
    """The value as text, if it is plain. Modules whose id is in `put_back` have no numbers."""
    if value is None or isinstance(value, str | bool):
        return repr(value)
    if is_own(value):
        return f"{_GENERATOR} ({OwnGenerator(value).digest()})"
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 and not value.is_meta else None
    if isinstance(value, Number):
        return repr(value.item()) if hasattr(value, "item") else repr(value)
    if is_iterator(value):
        return text_of_iterator(value, partial(_text, depth=max(0, depth - 1), put_back=put_back))
    if depth == 0 or (isinstance(value, _MANY) and len(value) > _MOST_ITEMS):
        return None
    if isinstance(value, dict):
        return _text_of_table(value, depth, put_back) if value else "{}"
    if isinstance(value, nn.Module):
        if is_torchs(value):
            return text_of(value)
        carried = carried_attributes(value)
        if id(value) in put_back:
            carried = {name: one for name, one in carried.items() if type(one) not in PLAIN}
        return f"{type(value).__name__}{_text_of_table(carried, depth, put_back) or ''}"
    if isinstance(value, FunctionType):
        return f"{text_of(value)}{_text_of_table(_kept_by(value), depth, put_back) or ''}"
    if isinstance(value, partial):
        return text_of(value)
    if isinstance(value, _MANY):
        texts = [text for one in value if (text := _text(one, depth - 1, put_back)) is not None]
        ordered = sorted(texts) if isinstance(value, set | frozenset) else texts
        return f"[{', '.join(ordered)}]" if len(texts) == len(value) else None
    if _is_of_the_script(value):
        return _text_of_table(attributes(value), depth, put_back)
    return type(value).__qualname__ if hasattr(value, "state_dict") or callable(value) else None


def _text_of_table(table: Mapping[Any, Any], depth: int, put_back: Collection[int]) -> str | None:
    """Of the entries that are plain; None if there are none."""
    texts = {name: _text(one, depth - 1, put_back) for name, one in list(table.items())}
    known = [f"{name}={text}" for name, text in texts.items() if text is not None]
    return f"({', '.join(known)})" if known else None


def _kept_by(function: FunctionType) -> Mapping[str, Any]:
    """What a function keeps from call to call: attributes of its own, lists and tables that are defaults of its
    arguments, and variables of the function around it that it sets, or that hold such."""
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    given = {**dict(zip(arguments[::-1], defaults[::-1], strict=False)), **(function.__kwdefaults__ or {})}
    kept = vars(function) | {name: one for name, one in given.items() if isinstance(one, _GROWING)}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is not set yet
            if name in _set_around(function.__code__) or isinstance(cell.cell_contents, _GROWING):
                kept[name] = cell.cell_contents
    return kept


@lru_cache(maxsize=1024)
def _set_around(code: CodeType) -> set[str]:
    """The variables of functions around it that its code sets."""
    return {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_DEREF"} & set(code.co_freevars)


def _tensors(value: Any, depth: int) -> Iterator[Any]:
    """Those of more than one element in the value, and NumPy's arrays; lists that are very long are no part of a
    training's state."""
    if isinstance(value, torch.Tensor):
        if _can_be_read(value):
            yield value
    elif is_numpy_array(value):
        if value.size and not value.dtype.hasobject:
            yield value
    elif isinstance(value, nn.Module):
        if "_parameters" not in vars(value):  # it was not made to its end
            return
        inside = (one for module in value.modules() for one in carried_attributes(module).values())
        tensors = (one for one in inside if isinstance(one, torch.Tensor))
        yield from filter(_can_be_read, chain(value.parameters(), value.buffers(), tensors))
    elif depth > 0 and isinstance(value, list | tuple | deque | dict) and len(value) <= _MOST_ITEMS:
        for one in list(value.values() if isinstance(value, dict) else value):
            yield from _tensors(one, depth - 1)
    elif depth > 0 and _is_of_the_script(value):
        yield from _tensors(attributes(value), depth - 1)


def _can_be_read(tensor: torch.Tensor) -> bool:
    """Whether it has elements, in plain memory."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return plain and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 1


def _digest(tensors: Iterable[Any]) -> str:
    flat = [tensor.reshape(-1) for tensor in tensors]
    words = "" if any(isinstance(one, torch.Tensor) for one in flat) else _OF_ARRAYS
    return words + contents([one[:: max(1, len(one) // _SAMPLED)] for one in flat])


def _is_of_the_script(value: Any) -> bool:
    """Whether it is an object of a class of the script, whose state is saved in no other way."""
    return is_of_script(type(value)) and not isinstance(value, _ELSEWHERE)


def _short(text: str) -> str:
    """A long text is cut, and gets a digest of the whole."""
    text = " ".join(text.split())
    if len(text) <= _MOST_TEXT:
        return text
    return f"{text[:_MOST_TEXT]}... ({hashlib.blake2b(text.encode(), digest_size=6).hexdigest()})"
