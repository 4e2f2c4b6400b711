"""Which of those who reach one another may go on, so that nobody else does.

# Note [Dead or silent]
# A worker whose kernel refuses the connection is dead: whatever it knew is gone with it. One that does not answer may
# live on behind a broken link, and decide the same of us. So those who go on must be more than those who are not with
# them. As soon as one of these is silent, the dead among them count too: before they died they may have gone on with
# the silent one. Those who leave do not count: nobody goes on with them. Nor do newcomers that ask to be admitted once
# more, after an attempt with them has failed: they have no state.

# Note [Who may go on]
# This is dynamic voting (Jajodia and Mutchler 1990), with the attempts of Lotem, Keidar and Dolev (1997). Those who go
# on must be more than half of the last generation that one of them was part of, and more than half of every later one
# that any of them has tried to form: it may have been formed for others. An attempt needs all of its members; so one of
# them who is here and has not tried it proves that it never was formed, and never will be. Two sets that both fulfil
# this have a member in common, and a member is in one generation at a time. Of two equal halves the one with the
# longest member (at first worker 0) goes on, or the one that asks the witness first.

# Note [Who reach one another]
# All members of a generation talk to each other, so every two of them must reach each other. Claims report who is
# silent. Of those who have claimed, the largest set in which nobody is silent for anybody is chosen. Workers of one
# host are cut off from the same others: they are taken, or left, together.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lockstep.elastic.membership.view import Attempt, Claim, GenerationId

MOST_GROUPS = 16
"""Up to how many groups with the same broken links the best choice is searched for; beyond, a good one is taken."""


class Outnumbered(Exception):  # noqa: N818 - a verdict, not an accident
    """Those whose claims have come may not go on: the others may be alive without them."""


class Overtaken(Exception):  # noqa: N818
    """Somebody was part of a generation that the coordinator knows nothing of: it went on without it."""


@dataclass(frozen=True)
class Tie:
    """Those who claim are exactly one half (`here`, by uid) of a generation; `has_longest`: its longest member too."""

    id: GenerationId
    here: tuple[str, ...]
    has_longest: bool


def last_formed(claims: Collection[Claim], own: Attempt) -> Attempt:
    """The latest generation that one of them was part of. `own` is the coordinator's. Raises Overtaken."""
    latest = max(claim.formed for claim in claims)
    known = [own, *(attempt for claim in claims for attempt in claim.attempts)]
    found = next((attempt for attempt in known if attempt.id == latest), None)
    if found is None:
        raise Overtaken
    return found


def ties(
    last: Attempt, claims: Collection[Claim], staying: Collection[Claim], dead: Collection[str]
) -> tuple[Tie, ...]:
    """Where those who stay are no more than half. Raises Outnumbered. See Note [Who may go on].

    `claims` are all that have come, and those who stay include newcomers that are admitted. `dead` are certain to be.
    """
    since = {attempt.id: attempt for claim in claims for attempt in claim.attempts if _is_later(attempt, last)}
    open_attempts = [attempt for attempt in since.values() if not _is_refuted(attempt, staying)]
    here = {claim.member.uid for claim in staying}
    leaving = {claim.member.uid for claim in claims if claim.leaving}
    harmless = {*dead, *(claim.member.uid for claim in claims if claim.is_newcomer)}
    found = (_weigh(attempt, here, leaving, harmless) for attempt in (last, *open_attempts))
    return tuple(tie for tie in found if tie is not None)


def _is_later(attempt: Attempt, last: Attempt) -> bool:
    return attempt.id.generation >= last.id.generation and attempt.id != last.id


def _is_refuted(attempt: Attempt, staying: Collection[Claim]) -> bool:
    """Whether one of its members who stays has not tried to form it."""
    return any(
        claim.member.uid in attempt.uids
        and not claim.is_newcomer
        and claim.formed != attempt.id
        and attempt.id not in {tried.id for tried in claim.attempts}
        for claim in staying
    )


def _weigh(attempt: Attempt, here: set[str], leaving: set[str], harmless: set[str]) -> Tie | None:
    """See Note [Dead or silent]."""
    with_us = [uid for uid in attempt.uids if uid in here]
    without = [uid for uid in attempt.uids if uid not in here | leaving]
    if harmless.issuperset(without) or len(with_us) > len(without):
        return None
    if len(with_us) < len(without):
        raise Outnumbered
    voters = [uid for uid in attempt.uids if uid not in leaving]
    return Tie(attempt.id, tuple(sorted(with_us)), voters[0] in here)


# -- who reach one another: see the note ------------------------------------------------------------------------


def mutually_reachable(claims: Collection[Claim]) -> list[Claim]:
    """The largest set of them in which nobody is silent for anybody; of two, the one with the lower slots."""
    broken = _broken_links(claims)
    cut: dict[frozenset[str], list[Claim]] = {}
    for claim in claims:
        if broken[claim.member.uid]:
            cut.setdefault(frozenset(broken[claim.member.uid]), []).append(claim)
    kept = _best(list(cut.values()), broken, is_exact=len(cut) <= MOST_GROUPS)
    taken = {claim.member.uid for group in kept for claim in group}
    return [claim for claim in claims if claim.member.uid in taken or not broken[claim.member.uid]]


def _broken_links(claims: Collection[Claim]) -> dict[str, set[str]]:
    broken: dict[str, set[str]] = {claim.member.uid: set() for claim in claims}
    for claim in claims:
        for uid in broken.keys() & set(claim.silent):
            broken[claim.member.uid].add(uid)
            broken[uid].add(claim.member.uid)
    return broken


def _best(groups: list[list[Claim]], broken: Mapping[str, set[str]], *, is_exact: bool) -> list[list[Claim]]:
    """Without the group that has the most broken links; or with it and without its opposites, if that is better."""

    def cut_from(group: list[Claim]) -> list[list[Claim]]:
        return [other for other in groups if other[0].member.uid in broken[group[0].member.uid]]

    def links(group: list[Claim]) -> tuple[int, int]:
        return sum(len(other) for other in cut_from(group)), _lowest(group)

    worst = max(groups, key=links, default=None)
    if worst is None or not cut_from(worst):
        return groups
    without = _best([group for group in groups if group is not worst], broken, is_exact=is_exact)
    if not is_exact:
        return without
    opposites = cut_from(worst)
    among = _best([group for group in groups if group not in opposites], broken, is_exact=is_exact)
    return max(without, among, key=_preference)


def _preference(groups: list[list[Claim]]) -> tuple[int, list[int]]:
    slots = sorted(claim.member.slot for group in groups for claim in group)
    return len(slots), [-slot for slot in slots]


def _lowest(group: list[Claim]) -> int:
    return min(claim.member.slot for claim in group)
