"""The way of small records between many workers, as data: host by host, then between hosts.

# Note [Host by host]
# Inside a host messages are cheap, so there the records go up a tree to the host's first worker, and all records come
# down the same tree. A worker has at most FANOUT others below it: more would be one Python loop over all of a host.
# Between the first workers of hosts records travel in the rounds of Bruck et al. ("Efficient algorithms for all-to-all
# communications in multiport message-passing systems", 1997): in round r a host receives all that the host 2^r places
# on has gathered, and has twice as many. So W workers on H hosts need log2(H) rounds between hosts and twice
# log_FANOUT(W/H) inside, and each record crosses the network to each host once.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from lockstep.wire.transport import Hosts

FANOUT = 8
"""See Note [Host by host]."""


class Child(NamedTuple):
    """A worker below another one in the tree of its host, and the places of all records that it passes up."""

    rank: int
    records: range


class Hop(NamedTuple):
    """A round between hosts: the first records are sent to worker `target`, others come from worker `source`."""

    target: int
    num_sent: int
    source: int
    first: int
    stop: int


class Route(NamedTuple):
    """One worker's part. Its buffer has the records of its own host first, and then those of the hosts after it.

    `own` are the places of its record and of all below it, `places` that of each rank's record.
    """

    own: range
    parent: int | None
    children: tuple[Child, ...]
    hops: tuple[Hop, ...]
    places: tuple[int, ...]


def route_of(hosts: Hosts, rank: int) -> Route:
    """The route of worker `rank`; the same value again for the same object `hosts`, which costs no look at it."""
    return _routes(_Same(hosts), rank)


class _Same:
    """Equal to what has the same object: comparing thousands of ranks would cost more than the exchange."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts

    def __hash__(self) -> int:
        return id(self.hosts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.hosts is self.hosts


@lru_cache(maxsize=64)
def _routes(same: _Same, rank: int) -> Route:
    hosts = same.hosts
    host = next(number for number, members in enumerate(hosts) if rank in members)
    members = hosts[host]
    own, parent, parts = _in_tree(range(len(members)), members.index(rank))
    children = tuple(Child(members[part.start], part) for part in parts)
    around = [*hosts[host:], *hosts[:host]]
    hops = tuple(_hops(around)) if parent is None else ()
    place_of = {other: place for place, other in enumerate(other for ranks in around for other in ranks)}
    places = tuple(place_of[other] for other in range(len(place_of)))
    return Route(own, None if parent is None else members[parent], children, hops, places)


def _in_tree(whole: range, member: int, parent: int | None = None) -> tuple[range, int | None, list[range]]:
    """A member's subtree, its parent, and the subtrees of its children; the first of a subtree is its root."""
    parts = _parts(range(whole.start + 1, whole.stop))
    if member == whole.start:
        return whole, parent, parts
    return _in_tree(next(part for part in parts if member in part), member, whole.start)


def _parts(rest: range) -> list[range]:
    """At most FANOUT parts of nearly one size, none of them empty."""
    number = min(FANOUT, len(rest))
    bounds = [rest.start + len(rest) * place // number for place in range(number + 1)] if number else []
    return [range(first, stop) for first, stop in pairwise(bounds)]


def _hops(around: Sequence[Sequence[int]]) -> Iterator[Hop]:
    """The rounds of the first worker of `around[0]`; the hosts are in the order in which its buffer has them."""
    starts, held = [0, *accumulate(map(len, around))], 1
    while held < len(around):
        number = min(held, len(around) - held)
        # The one that receives from here needs as many hosts as it lacks; it is in the same round.
        yield Hop(around[-held][0], starts[number], around[held][0], starts[held], starts[held + number])
        held += number
