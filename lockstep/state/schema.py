"""The form of the state in a snapshot, entry by entry.

A snapshot comes from a disk or from another worker, and its digest shows only that it arrived as it was written.
`check_form` checks all of the state before any of it is used, and refuses a wrong entry by name.

An entry that is added to the state gets a row in `STATE`, or in `LATER` if there are checkpoints without it. Entries
that are not known here are left alone.
"""

import random
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lockstep.errors import BadArgument, BadCheckpoint
from lockstep.optim.noise import NoiseScale
from lockstep.settings.limits import MOST_LANES
from lockstep.state.snapshot import Snapshot, check_packed, unpack

MOST = 2**63 - 1


@dataclass(frozen=True)
class Entry:
    """The path of a value in a snapshot, and the tensors that it may name."""

    path: str
    tensors: Mapping[str, torch.Tensor]

    def inside(self, key: object) -> "Entry":
        return Entry(f"{self.path}/{key}", self.tensors)

    def expect(self, holds: bool, value: object, expected: str) -> None:
        if not holds:
            raise BadCheckpoint(f"{self.path} is {reprlib.repr(value)}, not {expected}")


Check = Callable[[Any, Entry], None]
"""Raises BadCheckpoint, which names the entry, unless the value has the right form."""


def check_form(snapshot: Snapshot, what: str) -> None:
    """Refuses a snapshot whose state cannot be that of a run. `what` names the snapshot. Changes nothing."""
    root = Entry(f"{what}: state", snapshot.tensors)
    _fields(STATE, LATER)(snapshot.state, root)
    loaders, batches = snapshot.state["loaders"], snapshot.state.get("batches")
    fits = not batches or (type(batches) is type(loaders) and len(batches) == len(loaders))
    root.inside("batches").expect(fits, batches, f"one entry for each of {len(loaders)} loaders")


# -- the forms that entries have ----------------------------------------------------------------------------


def _whole(least: int, most: int = MOST) -> Check:
    def check(value: Any, entry: Entry) -> None:
        entry.expect(type(value) is int and value >= least, value, f"a whole number of {least} or more")
        entry.expect(value <= most, value, f"{most} at most")

    return check


def _of_type(expected: str, *kinds: type) -> Check:
    return lambda value, entry: entry.expect(type(value) in kinds, value, expected)


_integer = _of_type("a whole number", int)
_text = _of_type("a text", str)
_truth = _of_type("true or false", bool)
_number = _of_type("a number", int, float)


def _anything(value: Any, entry: Entry) -> None:
    """Every value passes."""


def _or_none(check: Check) -> Check:
    return lambda value, entry: None if value is None else check(value, entry)


def _or_bool(check: Check) -> Check:
    return lambda value, entry: None if type(value) is bool else check(value, entry)


def _row(*checks: Check) -> Check:
    """A list with an entry for each of the checks."""

    def check_each(value: Any, entry: Entry) -> None:
        entry.expect(isinstance(value, list) and len(value) == len(checks), value, f"a list of {len(checks)}")
        for number, check in enumerate(checks):
            check(value[number], entry.inside(number))

    return check_each


def _each(kind: type, expected: str, check: Check) -> Check:
    """A list or a table of entries that are all alike."""

    def check_each(value: Any, entry: Entry) -> None:
        entry.expect(isinstance(value, kind), value, expected)
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            check(item, entry.inside(name))

    return check_each


_list_of = partial(_each, list, "a list")
_by_name = partial(_each, dict, "a table by name")


def _table_by_number(check: Check) -> Check:
    """A table by whole numbers written as text."""

    def check_each(value: Any, entry: Entry) -> None:
        numbered = isinstance(value, dict) and all(name.isdecimal() and len(name) <= 9 for name in value)
        entry.expect(numbered, value, "a table by number")
        _by_name(check)(value, entry)

    return check_each


def _by_number(check: Check) -> Check:
    """The same, or, in older checkpoints, a list."""
    return lambda value, entry: (_list_of if isinstance(value, list) else _table_by_number)(check)(value, entry)


def _fields(needed: Mapping[str, Check], later: Mapping[str, Check]) -> Check:
    """A table that has all of `needed`, may have those of `later`, and any others."""

    def check_each(value: Any, entry: Entry) -> None:
        entry.expect(isinstance(value, dict), value, "a table by name")
        for name, check in {**needed, **later}.items():
            if name in value:
                check(value[name], entry.inside(name))
            elif name in needed:
                raise BadCheckpoint(f"{entry.inside(name).path} is missing")

    return check_each


def _packed(check: Check | None = None) -> Check:
    """A value as `pack` writes it; `check` is for the unpacked value."""

    def check_both(value: Any, entry: Entry) -> None:
        check_packed(value, entry.path, entry.tensors)
        if check is not None:
            check(unpack(value, entry.tensors), entry)

    return check_both


# -- entries with a form of their own -----------------------------------------------------------------------


def _optimizer(value: Any, entry: Entry) -> None:
    """What torch's `Optimizer.state_dict` returns, as far as the run itself reads it."""
    is_mapping = isinstance(value, dict) and isinstance(value.get("state"), dict)
    entry.expect(is_mapping, value, "the state of an optimizer")
    groups = value.get("param_groups")
    entry.expect(isinstance(groups, list), groups, "one with a list of parameter groups")
    for group in groups:
        numbers: Any = group.get("params") if isinstance(group, dict) else None
        are_numbered = isinstance(numbers, list) and all(type(number) is int for number in numbers)
        entry.expect(are_numbered, group, "one whose groups number their parameters")
        for number in numbers:
            _by_name(_anything)(value["state"].get(number, {}), entry.inside("state").inside(number))


def _made(value: Any, entry: Entry) -> None:
    _fields({"class": _text, "groups": _list_of(_by_name(_anything))}, {})(value, entry)


def _noise(value: Any, entry: Entry) -> None:
    _list_of(_by_name(_or_bool(_number)))(value, entry)
    for saved, preconditioned in zip(value, (False, True), strict=False):
        try:
            NoiseScale(preconditioned=preconditioned).load_state_dict(saved)
        except (BadArgument, OverflowError) as error:
            raise BadCheckpoint(f"{entry.path} cannot be used: {error}") from error


def _of_torch(value: Any, entry: Entry) -> None:
    _try(lambda: torch.Generator().set_state(value), entry)


def _of_cuda(value: Any, entry: Entry) -> None:
    is_state = isinstance(value, torch.Tensor) and value.dtype is torch.uint8 and value.dim() == 1
    entry.expect(is_state, value, "the state of a generator")
    if torch.cuda.is_initialized():
        _try(lambda: torch.Generator("cuda").set_state(value), entry)


def _of_python(value: Any, entry: Entry) -> None:
    _try(lambda: random.Random().setstate(value), entry)
    _or_none(_number)(value[2], entry.inside("kept normal number"))


def _of_numpy(value: Any, entry: Entry) -> None:
    entry.expect(isinstance(value, list) and len(value) == 5, value, "the state of a generator")
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _try(lambda: numpy.random.RandomState().set_state(tuple(value)), entry)


def _try(put: Callable[[], object], entry: Entry) -> None:
    """Sets a new generator to the state, which fails if it is none."""
    try:
        put()
    except (TypeError, ValueError, RuntimeError, OverflowError, KeyError, IndexError) as error:
        raise BadCheckpoint(f"{entry.path} is not the state of a generator: {error}") from error


_GENERATORS = _fields(
    {"torch": _of_torch, "cuda": _or_none(_of_cuda), "python": _of_python, "numpy": _or_none(_of_numpy)}, {}
)

STATE: Mapping[str, Check] = {
    "step": _whole(0),
    "epoch": _whole(0),
    "num_lanes": _whole(1, MOST_LANES),
    "seed": _integer,
    "loss": _packed(_or_none(_number)),
    "loaders": _by_number(_row(_whole(0), _whole(0))),
    "generators": _packed(_GENERATORS),
    "optimizers": _by_name(_packed(_optimizer)),
    "tracked": _by_name(_packed()),
}
"""The entries that every snapshot has."""

LATER: Mapping[str, Check] = {
    "forgotten": _list_of(_text),
    "logged": _whole(0),
    "generators_at_head": _fields({"epoch": _whole(0), "states": _packed(_GENERATORS)}, {}),
    "optimizers_made": _by_name(_packed(_made)),
    "noise": _noise,
    "hardware": _by_name(_text),
    "batches": _by_number(_or_none(_row(_text, _or_none(_whole(0))))),
    "drawn": _by_number(_text),
    "trained_on": _list_of(_whole(0)),
    "spent": _by_number(_whole(0)),
    "made": _fields({"before_training": _or_none(_whole(0)), "total": _whole(0), "lost": _truth}, {}),
    "carried": _table_by_number(_packed(_by_name(_anything))),
    "script": _fields(
        {
            "updates": _by_name(_whole(0)),
            "turns": _whole(0),
            "owners": _by_name(_whole(0)),
            "rhythm": _list_of(_text),
            "numbers": _list_of(_row(_text, _text, _text, _or_bool(_integer), _by_name(_integer))),
        },
        {
            "values": _list_of(_row(_text, _text, _text, _text)),
            "attributes": _by_name(_row(_packed(), _packed())),
            "compared": _by_name(_row(_packed(), _packed())),
            "data_sets": _by_name(_list_of(_text)),
            "data": _table_by_number(_by_name(_text)),
            "modes": _list_of(_row(_text, _list_of(_text), _list_of(_text), _truth)),
            "has_epochs": _truth,
            "draws_between": _truth,
            "contents": _by_name(_text),
        },
    ),
    "on_probation": _list_of(_text),
}
"""Those that came later: older checkpoints do not have them."""
