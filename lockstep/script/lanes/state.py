"""What the code of a lane keeps for the next one, found by looking at the script's objects before and after a lane.

# Note [Kept by a lane]
# A forward pass may leave something behind from which the next one goes on: a counter in an attribute of a module that
# a temperature is computed from, a hidden state, a global number, a metric that is fed.
#
#     def forward(self, x):
#         self.calls += 1               # moves once for each lane of this worker, not once for each batch
#         return self.net(x) / (1 + self.calls)
#
# Lanes on other workers do not see it, so it is another thing on another number of workers. Values alone do not show
# it, since scripts keep much that is only looked at (the attention of the last batch); and the source alone does not
# show what runs. So both must: a value that is another one after the first lane, and a statement that goes on from it.
# Where several statements do so together (detours.py), or where there was None before, a mask that is made once looks
# the same: so a later lane must change the value too. A module that is no part of torch, nor of the script (a metric of
# a library) is known by its whole numbers: it counts what it was fed. What is drawn at random where there was None
# before (draws.py) is noted where a later lane leaves it as it is.

# Note [Buffers that are no averages]
# After a step a buffer of a replicated model is the mean of what the lanes have made of it, and a whole number advances
# as in one lane. That is right for running averages, which is what the layers of torch have. A queue of keys, a sum or
# a codebook that a module of the script's own writes in its forward pass is another thing than in a plain loop. And the
# buffers of a module that the run was not given move by the lanes of their worker.
"""

from collections.abc import Callable, Iterable, Set
from functools import cached_property
from types import FrameType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lockstep.launch.channels.traceback_lines import is_users
from lockstep.script.call_site import Site
from lockstep.script.lanes.dependence import lanes_train_from
from lockstep.script.lanes.detours import handed_on_by_lanes, handed_on_in
from lockstep.script.lanes.draws import drawn_once_in, seeded_in_lanes
from lockstep.script.lanes.marks import (
    NOTHING,
    DictionaryMark,
    GeneratorMark,
    IsTable,
    KeptPlace,
    all_modules,
    marks_in,
    marks_of_buffers,
    no_table,
)
from lockstep.script.lanes.sums import changed_by_lanes, sums_at, totalled_names
from lockstep.script.lanes.tables import may_have_rows, rows_in, rows_of_lanes
from lockstep.script.owners import is_torchs
from lockstep.script.source.goes_on import gone_on_in
from lockstep.script.source.statements import Statements

_InFile = Callable[[str], Statements]
_InLanes = Callable[[str, int], Statements]


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
        self._modules = all_modules()
        self._buffers = [marks_of_buffers(module, self._tables_of) for module in self._modules]
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
        return _in_words(wanted, self._statement)

    def rows(self) -> list[str]:
        """The statements by which lanes write rows of a table, in words. See Note [Rows of a table] in tables.py."""
        changed = [one for one in self._changed if self._of_first and self._statement(one) is None]
        totalled = totalled_names(self._site.path)
        return _in_words((one for one in changed if one.name not in totalled and self._has_grown(one)), self._row)

    def drawn_once(self) -> list[str]:
        """What the first lane has drawn, and this one has left as it was, in words."""
        left = (one for one in self._of_first if one in self._now and one not in self._changed)
        return _in_words(left, self._draw)

    def drawn_from(self) -> list[str]:
        """The script's own generators from which the first lane has drawn, unless the script sets them in its lanes."""
        before = {place: mark for place, mark in self._marks.items() if isinstance(mark, GeneratorMark)}
        now = {} if self._of_first else self._now
        moved = [
            place
            for place, mark in before.items()
            if isinstance(new := now.get(place), GeneratorMark) and new.generator == mark.generator
            if new.digest != mark.digest and not self._is_set_in_lanes(place)
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
        for module, before in () if self._of_first else zip(self._modules, self._buffers, strict=True):
            is_average = of_models and (is_torchs(module) or isinstance(module, _NormBase))
            if (id(module) in self._replicated) == of_models and not is_average:
                now = marks_of_buffers(module, self._tables_of)
                found += [f"{name} of {type(module).__name__}" for name in before if before[name] != now.get(name)]
        return list(dict.fromkeys(found))

    @cached_property
    def _now(self) -> dict[KeptPlace, Any]:
        """The marks after the lane."""
        return self._look()

    def _look(self) -> dict[KeptPlace, Any]:
        return marks_in(self._frame, self._modules, self._replicated, self._tables_of)

    @cached_property
    def _changed(self) -> list[KeptPlace]:
        now = self._now
        marks = {one: mark for one, mark in self._marks.items() if not isinstance(mark, GeneratorMark)}
        wanted = self._of_first or marks.keys()
        return [one for one, mark in marks.items() if one in wanted and one in now and now[one] != mark]

    def _has_grown(self, place: KeptPlace) -> bool:
        """A dictionary, by its length."""
        before, now = self._marks[place], self._now[place]
        is_one = isinstance(before, DictionaryMark) and isinstance(now, DictionaryMark)
        return not is_one or before.length < now.length

    def _is_trained_from(self, place: KeptPlace) -> bool:
        site = self._site
        return lanes_train_from(site.path, site.line, place.file, place.name, is_attribute=bool(place.owner))

    def _statement(self, place: KeptPlace) -> str | None:
        """The statement that goes on from it, in words; None if no source shows one."""
        detour = self._detour(place) if self._of_first else None
        if detour is None and not is_users(place.file):
            return f"`{place.name}` of {place.holder}"
        return detour or self._shown(place, gone_on_in, changed_by_lanes)

    def _detour(self, place: KeptPlace) -> str | None:
        """One of several statements that go on from it together."""
        return self._shown(place, handed_on_in, handed_on_by_lanes)

    def _row(self, place: KeptPlace) -> str | None:
        """The statement that writes rows of it."""
        return self._shown(place, rows_in, rows_of_lanes)

    def _draw(self, place: KeptPlace) -> str | None:
        """The statement that draws it where it is not there yet."""
        return self._shown(place, lambda path: drawn_once_in(path, place.kind), _nothing)

    def _shown(self, place: KeptPlace, in_file: _InFile, in_lanes: _InLanes) -> str | None:
        """What the source shows of a variable in its own file; of an attribute in that of its class, or of the loop."""
        here, is_attribute = self._site.path, bool(place.owner)
        for path in dict.fromkeys((place.file, here) if is_attribute else (place.file,)):
            by_lanes = in_lanes(here, self._site.line) if path == here else Statements()
            for shown in (by_lanes, in_file(path)) if is_users(place.file) else ():
                found = shown.attributes if is_attribute else shown.variables
                if place.name in found:
                    return f"{found[place.name]} of {Site(path, 0).file}"
        return None

    def _tables_of(self, file: str, of_objects: bool) -> IsTable:
        """Whether rows of what has a name are written: the source is read when that is asked, since a script may have
        hundreds of files. See Note [Rows of a table] in tables.py."""
        here = self._site.path
        if not is_users(file):
            return no_table

        def is_table(name: str) -> bool:
            paths = [one for one in ({file, here} if of_objects else {file}) if may_have_rows(one, name)]
            shown = [rows_of_lanes(here, self._site.line)] if here in paths else []
            shown += [rows_in(path) for path in paths]
            return any(name in (one.attributes if of_objects else one.variables) for one in shown)

        return is_table


def _nothing(path: str, line: int) -> Statements:
    return Statements()


def _in_words(places: Iterable[KeptPlace], words_of: Callable[[KeptPlace], str | None]) -> list[str]:
    return list(dict.fromkeys(filter(None, map(words_of, places))))
