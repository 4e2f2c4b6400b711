"""The states of the generators outside of lanes: equal on all workers, or known to be one worker's own.

# Note [Chance outside of lanes]
# What a script draws outside of run.lanes must be the same on every worker, so every step compares the states of the
# generators. A worker that draws alone (an evaluation on rank 0) does no harm as long as no other worker draws from
# that generator any more. So one worker, known by its slot, may have a generator to itself. As soon as another draws
# from it too, the workers are refused: they would draw different numbers.
"""

import ctypes
import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.chance import Generators
from lockstep.wire.agreement import Facts

KINDS = ("torch", "CUDA", "Python", "NumPy")
SLOT = "slot"


def fact_name(kind: str) -> str:
    """The name of a generator's state among the facts that workers compare."""
    return f"{kind}'s random numbers outside of run.lanes"


def _moved_name(kind: str) -> str:
    return f"{fact_name(kind)}: moved"


class Streams:
    """The states of this worker's generators when its last step began, and which worker has one to itself.

    `owners` are these workers' slots, by kind of generator. See Note [Chance outside of lanes].
    """

    def __init__(self) -> None:
        self.owners: dict[str, int] = {}
        self._states: dict[str, Any] = {}
        self._digests: dict[str, str] = {}
        self._moved: frozenset[str] = frozenset()

    def look(self, now: Generators) -> None:
        """A step begins: records which generators have moved since the last one began."""
        states = {
            "torch": _bytes(now.torch_cpu),
            "CUDA": _bytes(now.torch_cuda),
            "Python": now.python,
            "NumPy": now.numpy,
        }
        present = {kind: state for kind, state in states.items() if state is not None}
        moved = [kind for kind, state in present.items() if not _is_same(state, self._states.get(kind))]
        self._digests |= {kind: _digest(present[kind]) for kind in moved}
        self._states, self._moved = present, frozenset(moved)

    def facts(self, slot: int) -> dict[str, str]:
        """What must be equal on all workers."""
        return {fact_name(kind): self._fact(kind, slot) for kind in self._states}

    def details(self, slot: int) -> dict[str, str]:
        """What else is needed to judge a difference."""
        return {SLOT: str(slot)} | {_moved_name(kind): str(kind in self._moved) for kind in self._states}

    def _fact(self, kind: str, slot: int) -> str:
        if kind not in self.owners:
            return self._digests[kind]
        own = slot == self.owners[kind] or kind not in self._moved
        return "one worker's own" if own else "one worker's own, and drawn from by another"


def drawn_alone(everyone: Sequence[Facts], kind: str) -> int | None:
    """The slot of the one worker that has drawn from a generator since the last step; None if it was not one alone.

    All others must have equal states. `everyone` has the facts and details of all workers.
    """
    moved = [rank for rank, facts in enumerate(everyone) if facts.get(_moved_name(kind)) == str(True)]
    if len(moved) != 1:
        return None
    others = {facts.get(fact_name(kind)) for rank, facts in enumerate(everyone) if rank != moved[0]}
    return int(everyone[moved[0]][SLOT]) if len(others) == 1 else None


def tolerated(everyone: Sequence[Facts], owners: Mapping[str, int]) -> dict[str, int] | None:
    """The slots that have generators to themselves from now on, if the workers differ in nothing else; else None."""
    slots = {int(facts[SLOT]) for facts in everyone}
    new_owners: dict[str, int] = {}
    for kind in KINDS:
        if len({facts.get(fact_name(kind)) for facts in everyone}) == 1:
            continue
        slot = drawn_alone(everyone, kind)
        if slot is None or (kind in owners and owners[kind] in slots):
            return None
        new_owners[kind] = slot
    return new_owners


def is_of_streams(name: str) -> bool:
    """Whether a fact is the state of a generator."""
    return any(name == fact_name(kind) for kind in KINDS)


def is_detail_of_streams(name: str) -> bool:
    """Whether it is one of their details."""
    return name == SLOT or any(name == _moved_name(kind) for kind in KINDS)


def _bytes(state: Any) -> bytes | None:
    return None if state is None else ctypes.string_at(state.data_ptr(), state.nbytes)


def _is_same(state: Any, before: Any) -> bool:
    """States of Python's and NumPy's generators are the same objects as long as nothing was drawn (chance.py)."""
    return state is before or (before is not None and _content(state) == _content(before))


def _content(state: Any) -> bytes:
    if isinstance(state, bytes):
        return state
    if isinstance(state[0], str):  # NumPy's: its name comes first
        _, words, *rest = state
        return bytes(words.tobytes()) + repr(rest).encode()
    version, words, kept = state
    return struct.pack(f"<{len(words)}I", *words) + repr((version, kept)).encode()


def _digest(state: Any) -> str:
    return hashlib.blake2b(_content(state), digest_size=8).hexdigest()
