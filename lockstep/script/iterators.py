"""Iterators that a script has put around a pass over a loader, and that count, or hold other data, by themselves.

# Note [Iterators that begin anew]
# After a resume a pass goes on in its middle, and so does a counter that lockstep can read (counters.py). But
# `islice(loader, 4)` counts inside of an iterator of the standard library, where nobody can read it, and
# `zip(loader, rows)` goes through `rows` from the beginning. So the first batch of a pass that goes on in its middle is
# asked who holds the pass: the garbage collector knows.
"""

import gc
from collections.abc import Collection, Iterator
from itertools import chain, count, cycle, islice, repeat, takewhile
from types import GeneratorType
from typing import Any

_MOST_WRAPPERS = 4
_TRANSPARENT = (enumerate, map, filter, chain, takewhile, GeneratorType)
"""They take one for each that they give, and know of nothing else. What a generator function counts can be read."""
_ENDLESS = (count, cycle, repeat)


def begins_anew(running: object, passes: Collection[object]) -> str | None:
    """What around the pass `running` begins anew although the pass does not, in words; None if nothing does.

    `passes` are those of all loaders of the run.
    """
    inner = running
    for _ in range(_MOST_WRAPPERS):
        holders = list(_holders(inner))
        for holder in holders:
            words = _counts_by_itself(holder, inner, passes)
            if words is not None:
                return words
        inner = next((holder for holder in holders if isinstance(holder, (*_TRANSPARENT, zip))), None)
        if inner is None:
            return None
    return None


def _holders(inner: object) -> Iterator[object]:
    """The iterators that hold `inner`; zip, chain and map hold theirs in a tuple."""
    for holder in gc.get_referrers(inner):
        if isinstance(holder, (*_TRANSPARENT, islice, zip)):
            yield holder
        elif type(holder) is tuple:
            yield from (outer for outer in gc.get_referrers(holder) if isinstance(outer, (zip, map)))


def _counts_by_itself(holder: object, inner: object, passes: Collection[object]) -> str | None:
    if isinstance(holder, islice):
        return "itertools.islice counts its batches by itself, from 0"
    if isinstance(holder, zip):
        others = [one for one in _zipped(holder) if one is not inner and not any(one is known for known in passes)]
        finite = [one for one in others if not isinstance(one, _ENDLESS)]
        if finite:
            return f"zip takes them together with a {type(finite[0]).__name__}, which starts from its beginning"
    return None


def _zipped(holder: object) -> Iterator[Any]:
    for referent in gc.get_referents(holder):
        if type(referent) is tuple:
            yield from (one for one in referent if hasattr(one, "__next__"))
