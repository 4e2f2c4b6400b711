"""A fingerprint of what each worker is about to do travels ahead of the data.

# Note [Proposals first]
# A collective is matched by position. If workers disagree on the operation, the order, a size or a dtype, the
# backend adds wrong numbers, aborts or hangs. So every collective starts with the same small exchange: a
# fingerprint of its proposal. If the fingerprints differ, every worker sees it and sends the proposal's full text, and
# all judge the same texts: most proposals raise a Disagreement that names the first difference. No data has moved then.
"""

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.errors import GO_THE_SAME_WAY, Disagreement
from lockstep.wire.exchange import exchange_texts, post
from lockstep.wire.transport import Transport

Facts = Mapping[str, str]
Judge = Callable[[int, Sequence[Facts]], Disagreement | None]
"""From a worker's rank and every worker's facts, by rank: the error that this worker raises; None if all may go on."""


def _nothing() -> Facts:
    return {}


OPERATION = "operation"
"""The first fact of every proposal: what the worker is about to do."""


def first_difference(here: int, facts_of_all: Sequence[Facts]) -> Disagreement:
    """Names the first fact on which worker `here` and the first worker that has other facts differ."""
    mine = facts_of_all[here]
    there = next(rank for rank, facts in enumerate(facts_of_all) if facts != mine)
    theirs = facts_of_all[there]
    name = next(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name))
    sides = tuple(
        tuple(rank for rank, facts in enumerate(facts_of_all) if facts == one) for one in _distinct(facts_of_all)
    )
    advice = GO_THE_SAME_WAY if name == OPERATION else Disagreement.advice
    return Disagreement(name, here, mine.get(name, "nothing"), there, theirs.get(name, "nothing"), advice, sides)


def _distinct(facts_of_all: Sequence[Facts]) -> list[Facts]:
    distinct: list[Facts] = []
    for facts in facts_of_all:
        if facts not in distinct:
            distinct.append(facts)
    return distinct


@dataclass(frozen=True)
class Proposal:
    """What one worker is about to do: `facts` in the order in which a difference is named.

    A long list of facts that seldom changes is given as `details`, which are sent only on disagreement, and by its
    fingerprint. `judge` decides where the fingerprints differ.
    """

    facts: Mapping[str, object]
    details: Callable[[], Facts] = _nothing
    details_fingerprint: str = ""
    judge: Judge = first_difference

    def fingerprint(self) -> bytes:
        text = "\n".join(f"{name}: {fact}" for name, fact in self.facts.items()) + self.details_fingerprint
        return hashlib.blake2b(text.encode(), digest_size=32).digest()

    def written_out(self) -> str:
        lines = {**{name: str(fact) for name, fact in self.facts.items()}, **self.details()}
        return "\n".join(f"{name}\t{' '.join(value.splitlines())}" for name, value in lines.items())


class Agreement:
    """The exchange of a proposal with all workers. `check` may be called from several threads; it waits once."""

    def __init__(self, transport: Transport, proposal: Proposal | Callable[[], Proposal]) -> None:
        """A proposal that is costly to make may be given as a function, which is called only if there are peers."""
        self._transport = transport
        self._lock = threading.Lock()
        self._verdict: Disagreement | None = None
        self._known = not transport.world.peers  # no peer to disagree with
        if not self._known:
            self._proposal = proposal if isinstance(proposal, Proposal) else proposal()
            fingerprint = torch.frombuffer(bytearray(self._proposal.fingerprint()), dtype=torch.uint8)
            self._posted = post(transport, fingerprint)

    def check(self) -> None:
        """Collective. Raises a Disagreement on every worker, unless all may go on."""
        if not self._known:
            with self._lock:
                if not self._known:
                    self._verdict = self._compare()
                    self._known = True
        if self._verdict is not None:
            raise self._verdict

    def _compare(self) -> Disagreement | None:
        records = self._posted.wait()
        if all(torch.equal(record, records[0]) for record in records):
            return None
        texts = exchange_texts(self._transport, self._proposal.written_out())
        return self._proposal.judge(self._transport.world.rank, [read_facts(text) for text in texts])


def read_facts(text: str) -> Facts:
    """The facts of a proposal that was written out."""
    return dict(line.split("\t", 1) for line in text.split("\n"))
