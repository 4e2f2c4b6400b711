"""What the code of a lane keeps for the next one, found by looking at the script's objects before and after a lane.

# Note [Kept by a lane]
# A forward pass may leave something behind from which the next one goes on: a counter in an attribute of a module that
# a temperature is computed from, a hidden state, a global number, a metric that is fed. Lanes on other workers do not
# see it, so it is another thing on another number of workers, and it moves once for each lane where a plain loop moves
# it once for each batch. Values alone do not show it, since scripts keep much that is only looked at (the attention of
# the last batch); and the source alone does not show what runs. So both must: a value that is another one after the
# first lane, and a statement that goes on from it. Where several statements do so together (detours.py), or where there
# was None before, a mask that is made once looks the same: so a later lane must change the value too. A module that is
# no part of torch, nor of the script (a metric of a library) is known by its whole numbers: it counts what it was fed.
# What is drawn at random where there was None before (drawn_once.py) is noted where a later lane leaves it as it is.

# Note [Buffers that are no averages]
# After a step a buffer of a replicated model is the mean of what the lanes have made of it, and a whole number advances
# as in one lane. That is right for running averages, which is what the layers of torch have. A queue of keys, a sum or
# a codebook that a module of the script's own writes in its forward pass is another thing than in a plain loop. And the
# buffers of a module that the run was not given move by the lanes of their worker.
"""

import gc
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.data.own_generators import OwnGenerator, is_own
from lockstep.data.structure import attributes
from lockstep.events import KEPT_BY_LANE
from lockstep.gradients.fingerprint import fingerprints
from lockstep.launch.channels.traceback_lines import is_users
from lockstep.launch.worker.load_once import loaded_by_script
from lockstep.script.call_site import Site, look_into
from lockstep.script.detours import attributes_handed_on, handed_on_by_lanes, outer_names_handed_on
from lockstep.script.drawn_once import attributes_drawn_once, outer_names_drawn_once
from lockstep.script.goes_on import attributes_that_go_on, outer_names_that_go_on, seeded_in_lanes
from lockstep.script.lane_dependence import lanes_train_from
from lockstep.script.lane_sums import changed_by_lanes, sums_at, totalled_names
from lockstep.script.owners import file_of, is_torchs
from lockstep.script.tables import attributes_with_rows, may_have_rows, outer_names_with_rows, rows_of_lanes

_UNCHANGING = frozenset({str, bytes, type, FunctionType, BuiltinFunctionType, ModuleType})
"""Most variables of a file. They have no state that is looked at, and no mark."""
_WITHOUT_OWN = _UNCHANGING - {type} | {int, float, bool, type(None)}
"""Types whose objects have no attributes of the script."""
_NUMBERS = (int, float, complex)
_MANY = (list, tuple, dict, set, deque)
_MOST_ITEMS, _MOST_NAMED = 100, 3
_MOST_ARRAY_BYTES = 16 << 20
_IsTable = Callable[[str], bool]
"""Whether rows of what has this name are written. See Note [Rows of a table] in tables.py."""
_InFile = Callable[[str], Mapping[str, str]]
_InLanes = Callable[[str, int], Mapping[str, str]]
NOTHING = "nothing"
"""The mark of None: what is made once and kept is None before."""
_ELSEWHERE = (Optimizer, DataLoader, Dataset, Sampler, ModuleType)
"""Types that are no objects of a lane, or whose state is looked at in other ways."""


@dataclass(frozen=True)
class KeptPlace:
    """Where a value stands: a variable, or an attribute of an object whose variable or class is `holder`."""

    holder: str
    name: str
    owner: int
    """The object's id."""
    file: str
    """That of the variable, or of the object's class."""
    kind: str = ""
    """The object's class."""


@dataclass(frozen=True)
class _GeneratorMark:
    """A generator of the script's own. See Note [Generators of the script's own] in own_generators.py."""

    generator: int
    """Its id."""
    digest: str


@dataclass(frozen=True)
class _DictionaryMark:
    length: int
    values: tuple[Any, ...]


class LaneState:
    """Marks of what a lane of the loop at `site` may keep, taken before it; asked for changes after it.

    `replicated` are the models of the run. `suspects` are those of the first lane, if this is a later one: then only
    they are looked at.
    """

    def __init__(
        self, frame: FrameType, site: Site, replicated: Iterable[nn.Module], suspects: Set[KeptPlace] = frozenset()
    ) -> None:
        self._frame, self._site, self._of_first = frame, site, suspects
        self._replicated = {id(module) for model in replicated for module in model.modules()}
        self._modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
        self._buffers = list(map(self._buffer_marks, self._modules))
        self._marks = self._look()

    def kept(self, *, by_models: bool, only_trained_from: bool = False) -> list[str]:
        """What the lane has kept, in words: modules of replicated models, or else others. See Note [Kept by a lane].

        Of what others keep, sums that the loop shows, and what is totalled, are left out; with `only_trained_from` all
        on which the training of the lanes does not depend.
        """
        changed = [one for one in self._changed if self._of_first or self._marks[one] is not NOTHING]
        wanted = [place for place in changed if (place.owner in self._replicated) == by_models]
        if only_trained_from:
            wanted = list(filter(self._is_trained_from, wanted))
        elif not by_models:
            path = self._site.path
            sums, totalled = {one.name for one in sums_at(path, self._site.line)}, totalled_names(path)
            wanted = [one for one in wanted if not {one.holder, one.name} & sums and one.name not in totalled]
        return list(dict.fromkeys(filter(None, map(self._statement, wanted))))

    def rows(self) -> list[str]:
        """The statements by which lanes write rows of a table, in words. See Note [Rows of a table] in tables.py."""
        changed = [one for one in self._changed if self._of_first and self._statement(one) is None]
        totalled = totalled_names(self._site.path)
        wanted = [one for one in changed if one.name not in totalled and self._has_grown(one)]
        return list(dict.fromkeys(filter(None, map(self._row, wanted))))

    def drawn_once(self) -> list[str]:
        """What the first lane has drawn, and this one has left as it was, in words."""
        left = (one for one in self._of_first if one in self._now and one not in self._changed)
        return list(dict.fromkeys(filter(None, map(self._draw, left))))

    def drawn_from(self) -> list[str]:
        """The script's own generators from which the first lane has drawn, unless the script sets them in its lanes."""
        now = {} if self._of_first else self._now
        moved = [
            place
            for place, mark in self._marks.items()
            if isinstance(mark, _GeneratorMark) and isinstance(new := now.get(place), _GeneratorMark)
            if new.generator == mark.generator and new.digest != mark.digest and not self._is_set_in_lanes(place)
        ]
        return list(dict.fromkeys(f"`{one.name}`{f' of {one.holder}' if one.holder else ''}" for one in moved))

    def _is_set_in_lanes(self, place: KeptPlace) -> bool:
        files = [file for file in (place.file, self._site.path) if is_users(file)]
        return any(place.name in seeded_in_lanes(file) for file in files)

    @property
    def suspects(self) -> Set[KeptPlace]:
        """What it has changed, and hands on if a later lane changes it too; after a later one, what that has not."""
        if self._of_first:
            return self._of_first - set(self._changed)
        new = [one for one in self._changed if self._marks[one] is NOTHING or self._statement(one) is None]
        ways = (self._statement, self._detour, self._row, self._draw)
        return {one for one in new if any(way(one) is not None for way in ways)}

    def buffers(self, *, of_models: bool) -> list[str]:
        """Buffers that the first lane has written. See Note [Buffers that are no averages]."""
        found: list[str] = []
        if self._of_first:
            return found
        for module, before in zip(self._modules, self._buffers, strict=True):
            is_average = of_models and (is_torchs(module) or isinstance(module, _NormBase))
            if (id(module) in self._replicated) == of_models and not is_average:
                now = self._buffer_marks(module)
                found += [f"{name} of {type(module).__name__}" for name in before if before[name] != now.get(name)]
        return list(dict.fromkeys(found))

    def _buffer_marks(self, module: nn.Module) -> dict[str, Any]:
        """Kernels of torch's layers write statistics without a sign, and count batches by an ordinary addition."""
        tables = self._tables_of(file_of(type(module)), of_objects=True)
        buffers = vars(module).get("_buffers", {})  # one that was not made to its end has none
        named = [(name, one) for name, one in buffers.items() if one is not None and not one.is_inference()]
        return {name: _mark(one, name, tables) for name, one in named}

    @cached_property
    def _now(self) -> dict[KeptPlace, Any]:
        """The marks after the lane."""
        return self._look()

    @cached_property
    def _changed(self) -> list[KeptPlace]:
        now = self._now
        marks = {one: mark for one, mark in self._marks.items() if not isinstance(mark, _GeneratorMark)}
        wanted = self._of_first or marks.keys()
        return [one for one, mark in marks.items() if one in wanted and one in now and now[one] != mark]

    def _statement(self, place: KeptPlace) -> str | None:
        """The statement that goes on from it, in words; None if no source shows one."""
        if self._of_first and self._detour(place) is not None:
            return self._detour(place)
        if not is_users(place.file):
            return f"`{place.name}` of {place.holder}"
        here = self._site.path
        if place.owner:
            for path in (place.file, here):
                if place.name in attributes_that_go_on(path):
                    return f"{attributes_that_go_on(path)[place.name]} of {Site(path, 0).file}"
            return None
        statements = dict(outer_names_that_go_on(place.file))
        if place.file == here:
            statements |= changed_by_lanes(here, self._site.line)
        return f"{statements[place.name]} of {Site(place.file, 0).file}" if place.name in statements else None

    def _is_trained_from(self, place: KeptPlace) -> bool:
        site = self._site
        return lanes_train_from(site.path, site.line, place.file, place.name, is_attribute=bool(place.owner))

    def _detour(self, place: KeptPlace) -> str | None:
        """The same for several statements that go on from it together."""
        return self._shown(place, attributes_handed_on, outer_names_handed_on, handed_on_by_lanes)

    def _shown(self, place: KeptPlace, in_objects: _InFile, in_variables: _InFile, in_lanes: _InLanes) -> str | None:
        """What the source shows of it, in its own file or in that of the loop."""
        if not is_users(place.file):
            return None
        here, in_functions = self._site.path, in_objects if place.owner else in_variables
        found = {path: dict(in_functions(path)) for path in dict.fromkeys((place.file, here))}
        if place.owner or place.file == here:
            found[here] |= in_lanes(here, self._site.line)
        shown = [f"{names[place.name]} of {Site(path, 0).file}" for path, names in found.items() if place.name in names]
        return shown[0] if shown else None

    def _row(self, place: KeptPlace) -> str | None:
        """The statement that writes rows of it."""
        return self._shown(place, attributes_with_rows, outer_names_with_rows, rows_of_lanes)

    def _draw(self, place: KeptPlace) -> str | None:
        """The statement that draws it where it is not there yet: a variable, or an attribute of an object."""
        found = attributes_drawn_once(place.file, place.kind) if place.owner else outer_names_drawn_once(place.file)
        return f"{found[place.name]} of {Site(place.file, 0).file}" if place.name in found else None

    def _tables_of(self, file: str | None, of_objects: bool) -> _IsTable:
        """Whether rows of an attribute of objects of that file, or of one of its variables, are written.

        The source is read when that is asked: a script may have hundreds of files.
        """
        if file is None or not is_users(file):
            return _no_table
        here, in_functions = self._site.path, attributes_with_rows if of_objects else outer_names_with_rows

        def is_table(name: str) -> bool:
            paths = [one for one in ({file, here} if of_objects else {file}) if may_have_rows(one, name)]
            is_of_lanes = here in paths and name in rows_of_lanes(here, self._site.line)
            return is_of_lanes or any(name in in_functions(one) for one in paths)

        return is_table

    def _has_grown(self, place: KeptPlace) -> bool:
        """A dictionary, by its length."""
        before, now = self._marks[place], self._now[place]
        is_one = isinstance(before, _DictionaryMark) and isinstance(now, _DictionaryMark)
        return not is_one or before.length < now.length

    def _look(self) -> dict[KeptPlace, Any]:
        """What stands where, as marks."""
        variables = _variables(self._frame)
        named = [(name, one) for _, values in variables for name, one in values.items()]
        objects = {id(one): (name, one) for name, one in [*((type(m).__name__, m) for m in self._modules), *named]}
        marks = {}
        for file, values in variables:
            found = _marked(values, tables=self._tables_of(file, of_objects=False))
            marks.update({KeptPlace("", name, 0, file): mark for name, mark in found})
        for owner, (holder, one) in objects.items():
            for file, held in self._attributes(one):
                tables = self._tables_of(file, of_objects=True)
                found = _marked(held, tables=tables, only_whole=not is_users(file))
                marks.update({KeptPlace(holder, name, owner, file, type(one).__name__): mark for name, mark in found})
        return marks

    def _attributes(self, one: Any) -> list[tuple[str, Mapping[str, Any]]]:
        """Those of an object of the script, and of its class; of another package's, those of a module of its own."""
        if type(one) in _WITHOUT_OWN:
            return []
        if isinstance(one, type):
            file = file_of(one)
            return [(file, vars(one))] if file is not None and is_users(file) else []
        file = file_of(type(one))
        if file is None or isinstance(one, _ELSEWHERE) or is_torchs(one):
            return []
        own = (file, attributes(one))
        if is_users(file):
            return [(file, vars(type(one))), own]
        return [own] if isinstance(one, nn.Module) and id(one) not in self._replicated else []


def notes_on(state: LaneState, is_step: bool, num_lanes: int, has_peers: bool) -> Iterator[str]:
    """What a user should know of what a lane has kept."""
    own = state.kept(by_models=True) if is_step and num_lanes > 1 else []
    if is_step and num_lanes > 1:
        if own:
            yield (
                f"{KEPT_BY_LANE}, by {listed(own)}: it moves once for each lane of this "
                "worker, not once for each batch. If the loss depends on it, another number of workers gives other "
                "bits. Change it after the loop over lanes, compute it from run.step, or keep it for each lane in "
                "run.carried."
            )
        drawn = state.drawn_once()
        if drawn:
            yield (
                f"{KEPT_BY_LANE}, by {listed(drawn)}: each worker draws it in its first lane, so another number of "
                "workers, or a run that is resumed, has other numbers. Draw it before training, into a buffer of a "
                "replicated model (register_buffer)."
            )
        written = state.buffers(of_models=True)
        if written:
            yield (
                f"lanes write {listed(written)}: after a step such a buffer is the mean of what the lanes have made "
                "of it, and a whole number advances as in one lane. That is right for a running average, and not for "
                'a sum, a queue or a table: docs/lanes.md, "Buffers that lanes write".'
            )
        strange = state.buffers(of_models=False)
        if strange:
            yield (
                f"lanes write {listed(strange)}, which is no model of the run (what run.replicate is given by a name, "
                "as in ema=ema, is only saved): each worker moves its buffers by its own lanes. Write "
                "run.replicate(module) for it too, or call its eval() before."
            )
    drawn_from = state.drawn_from() if num_lanes > 1 else []
    if drawn_from:
        yield (
            f"lanes draw from {listed(drawn_from)}, a random generator of the script's own: it goes on from lane to "
            "lane of this worker, so another number of workers gives other numbers. Draw from torch's, Python's or "
            "NumPy's own (without generator=), which the run sets for each lane, or make yours anew in each: "
            "torch.Generator().manual_seed(torch.initial_seed())."
        )
    rows = state.rows() if has_peers else []
    if rows:
        yield (
            f"{KEPT_BY_LANE}, by {listed(rows)}: a worker writes the rows of its own lanes only, and has old ones of "
            "others. Keep index and row in a list, rows.append((index, row)), and write what run.gather(rows) gives "
            "after the loop, the same on every worker."
        )
    matters = has_peers or (is_step and num_lanes > 1)
    others = state.kept(by_models=False, only_trained_from=not has_peers) if matters else []
    others = [one for one in others if one not in own]
    if others:
        yield (
            f"{KEPT_BY_LANE}, by {listed(others)}: a worker computes its own lanes only, so "
            "another number of workers gives another value. run.total adds up what all lanes hold, run.gather has the "
            "values of all, run.carried keeps something for each lane; what counts batches goes after the loop."
        )


def listed(words: Sequence[str]) -> str:
    return ", ".join(words[:_MOST_NAMED]) + (
        f" and {len(words) - _MOST_NAMED} more" if len(words) > _MOST_NAMED else ""
    )


def _variables(frame: FrameType) -> list[tuple[str, Mapping[str, Any]]]:
    """The variables of the script's calls, and of its files, by file."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for (path, name), values in look_into(frame, dict).items():
        if not any(type(one.get("self")).__name__ == name for file, one in found if file == path):
            found.append((path, values))  # and not the attributes of `self`, which is a variable
    return [*found, *((file, dict(vars(module))) for file, module in users_modules(len(sys.modules)))]


@lru_cache(maxsize=1)
def users_modules(_: int) -> list[tuple[str, ModuleType]]:
    """Each with its file. They are looked for again when another number of modules is loaded."""
    modules = [
        one for one in loaded_by_script() if isinstance(one, ModuleType) and not one.__name__.startswith("torch.")
    ]
    named = [(getattr(module, "__file__", None), module) for module in modules]
    return [(file, one) for file, one in named if isinstance(file, str) and is_users(file)]


def _no_table(_: str) -> bool:
    return False


def _marked(values: Mapping[str, Any], *, tables: _IsTable, only_whole: bool = False) -> Iterator[tuple[str, Any]]:
    for name, value in list(values.items()):
        if not name.startswith("__") and (mark := _mark(value, name, tables, only_whole)) is not None:
            yield name, mark


def _mark(value: Any, name: str = "", is_table: _IsTable = _no_table, only_whole: bool = False) -> Any:
    """Something that is another one when the value has changed; None where it is not looked at.

    Of a table every row counts, however it is written.
    """
    kind = type(value)
    if kind is int:
        return value
    if only_whole or kind in _UNCHANGING:
        return None
    if value is None:
        return NOTHING
    if isinstance(value, _NUMBERS):
        return repr(value)
    if isinstance(value, torch.Tensor):
        rows = (int(fingerprints({"": value})),) if value.layout == torch.strided and is_table(name) else ()
        return id(value), None if value.is_inference() else value._version, *rows
    if isinstance(value, _MANY):
        most = None if len(value) > _MOST_ITEMS and is_table(name) else _MOST_ITEMS
        inner = islice(value.values() if isinstance(value, dict) else value, most)
        marks = tuple(_mark(one) for one in inner if not isinstance(one, _MANY))
        return _DictionaryMark(len(value), marks) if isinstance(value, dict) else (len(value), *marks)
    if kind.__name__ == "ndarray" and kind.__module__ == "numpy":
        is_looked_at = value.dtype != object and (value.nbytes <= _MOST_ARRAY_BYTES or is_table(name))
        return zlib.crc32(value.tobytes()) if is_looked_at else None
    return _GeneratorMark(id(value), OwnGenerator(value).digest()) if is_own(value) else None
