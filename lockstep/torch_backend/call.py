"""What a member asks for, in words that all members compare before any data moves.

# Note [Words before data]
# Collectives are matched by position: the third call here meets the third call there. Every call therefore begins
# with a meeting at which each member shows what it asks for. If two differ, or one asks for something impossible, all
# members raise the same error at the same moment; nothing but the members' own staging memory was written, and the
# group can be used on. The words hold no number of the call: it is the same everywhere by construction, and without
# it equal words, which are the rule, are recognised by a look into a dictionary.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import product
from typing import Any

from lockstep.errors import BadArgument, Disagreement


@dataclass(frozen=True)
class CollectiveCall:
    """One operation as one member sees it. Sizes count elements; `gives` and `takes` are by tensor, then by member."""

    operation: str
    dtypes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    reduction: str = "none"
    root: int = -1
    gives: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()
    fault: str = ""


@lru_cache(maxsize=1024)
def encode(call: CollectiveCall) -> bytes:
    return json.dumps([getattr(call, field.name) for field in fields(call)]).encode()


@lru_cache(maxsize=1024)
def decode(words: bytes) -> CollectiveCall:
    values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in json.loads(words)]
    return CollectiveCall(*values)


def check(calls: Mapping[int, CollectiveCall], here: int, global_ranks: Sequence[int]) -> None:
    """Raises on every member if two of them differ, or one asked for the impossible. See Note [Words before data].

    Members are named by their global ranks, whatever the group.
    """
    for there, call in calls.items():
        _check_equal(calls[here], call, global_ranks[here], global_ranks[there], ["operation"])
    for member, call in calls.items():  # before what else may differ: a faulty call may not know it
        if call.fault:
            raise BadArgument(f"{call.operation} on worker {global_ranks[member]}: {call.fault}. {ADVICE}")
    for there, call in calls.items():
        _check_equal(calls[here], call, global_ranks[here], global_ranks[there], list(_COMPARED))
    for giver, taker in product(calls, calls):
        _check_pair(calls, giver, taker, global_ranks)


ADVICE = "Nothing was exchanged, and the group can be used on."

_COMPARED = {
    "operation": "the operation",
    "dtypes": "the dtype",
    "sizes": "the number of elements",
    "reduction": "the reduction",
    "root": "the root",
}


def _check_equal(mine: CollectiveCall, theirs: CollectiveCall, here: int, there: int, names: Sequence[str]) -> None:
    for name in names:
        if getattr(mine, name) != getattr(theirs, name):
            what = _COMPARED[name] if name == "operation" else f"{_COMPARED[name]} of {mine.operation}"
            advice = f"All members must make the same calls in the same order. {ADVICE}"
            raise Disagreement(what, here, _told(getattr(mine, name)), there, _told(getattr(theirs, name)), advice)


def _check_pair(calls: Mapping[int, CollectiveCall], giver: int, taker: int, global_ranks: Sequence[int]) -> None:
    """What one gives to another must be what the other takes."""
    given, taken = part(calls[giver].gives, taker, len(calls)), part(calls[taker].takes, giver, len(calls))
    if given != taken:
        what = f"the number of elements that the first gives to the second in {calls[giver].operation}"
        raise Disagreement(what, global_ranks[giver], _told(given), global_ranks[taker], _told(taken), ADVICE)


def _told(value: object) -> str:
    return ", ".join(map(str, value)) or "nothing" if isinstance(value, tuple) else str(value)


def part(sizes: tuple[int, ...], member: int, num_members: int) -> tuple[int, ...]:
    """Of sizes by tensor and member, those of one member."""
    return sizes[member::num_members]
