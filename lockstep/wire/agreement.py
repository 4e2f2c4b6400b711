"""A fingerprint of what each worker is about to do travels ahead of the data.

# Note [Plans first]
# A collective is matched by position. If workers disagree on the operation, the order, a size or a dtype, the
# backend adds wrong numbers, aborts or hangs. So every collective starts with the same small exchange: a
# fingerprint of its plan. If the fingerprints differ, everyone sees it, everyone sends the plan's full text,
# and each raises a Disagreement that names the first difference. No data has moved by then.
"""

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lockstep.errors import Disagreement
from lockstep.wire.exchange import exchange_texts, post
from lockstep.wire.transport import Transport


def _nothing() -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class Plan:
    """What one worker is about to do: `facts` in the order in which a difference should be named.

    A long list of facts that seldom changes is given as `details`, which are written out only on disagreement, and by
    its fingerprint.
    """

    facts: Mapping[str, object]
    details: Callable[[], Mapping[str, str]] = _nothing
    details_fingerprint: str = ""

    def fingerprint(self) -> bytes:
        text = "\n".join(f"{name}: {fact}" for name, fact in self.facts.items()) + self.details_fingerprint
        return hashlib.blake2b(text.encode(), digest_size=32).digest()

    def written_out(self) -> str:
        lines = {**{name: str(fact) for name, fact in self.facts.items()}, **self.details()}
        return "\n".join(f"{name}\t{value}" for name, value in lines.items())


class Agreement:
    """A plan on its way to all workers. `check` may be called from several threads; it waits once."""

    def __init__(self, transport: Transport, plan: Plan) -> None:
        self._transport = transport
        self._plan = plan
        self._lock = threading.Lock()
        self._verdict: Disagreement | None = None
        self._known = not transport.world.peers  # nobody to disagree with
        if not self._known:
            self._posted = post(transport, torch.frombuffer(bytearray(plan.fingerprint()), dtype=torch.uint8))

    def check(self) -> None:
        """Collective. Returns if all workers have the same plan; else raises a Disagreement on every one."""
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
        rank = self._transport.world.rank
        texts = exchange_texts(self._transport, self._plan.written_out())
        other = next(peer for peer, text in enumerate(texts) if text != texts[rank])
        return first_difference(rank, texts[rank], other, texts[other])


def first_difference(here: int, mine: str, there: int, theirs: str) -> Disagreement:
    """Names the first fact on which two written-out plans differ."""
    my_facts, their_facts = _facts(mine), _facts(theirs)
    names = [*my_facts, *(name for name in their_facts if name not in my_facts)]
    name = next(name for name in names if my_facts.get(name) != their_facts.get(name))
    return Disagreement(name, here, my_facts.get(name, "nothing"), there, their_facts.get(name, "nothing"))


def _facts(text: str) -> dict[str, str]:
    return dict(line.split("\t", 1) for line in text.split("\n"))
