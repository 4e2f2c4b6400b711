"""The way of records, host by host: every worker gets every record, by few messages, whatever the hosts are."""

import math
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.wire.route import FANOUT, Route, route_of
from lockstep.wire.transport import Hosts

HOSTS = st.lists(st.integers(1, 70), min_size=1, max_size=9).flatmap(
    lambda sizes: st.permutations(range(sum(sizes))).map(lambda ranks: _dealt(sizes, ranks))
)


def _dealt(sizes: list[int], ranks: list[int]) -> Hosts:
    """Hosts of these sizes, whose workers have any ranks."""
    left = iter(ranks)
    hosts = [tuple(sorted(next(left) for _ in range(size))) for size in sizes]
    return tuple(sorted(hosts))


class Played:
    """Workers that follow their routes in any order that the messages allow; a record is its worker's rank."""

    def __init__(self, hosts: Hosts) -> None:
        self.routes = {rank: route_of(hosts, rank) for members in hosts for rank in members}
        self.buffers: dict[int, list[int | None]] = {rank: [None] * len(self.routes) for rank in self.routes}
        self.messages: dict[tuple[int, int], deque[list[int | None]]] = {}
        self.num_sent, self.num_received = dict.fromkeys(self.routes, 0), dict.fromkeys(self.routes, 0)
        running = {rank: self._follow(rank, route) for rank, route in self.routes.items()}
        while running:
            done = [rank for rank, moves in running.items() if next(moves, "done") == "done"]
            running = {rank: moves for rank, moves in running.items() if rank not in done}
            assert self.moved or done, "everybody waits"
            self.moved = False

    moved = True

    def _follow(self, rank, route: Route):  # type: ignore[no-untyped-def]
        buffer = self.buffers[rank]
        buffer[route.own.start] = rank
        for child in route.children:
            yield from self._receive(child.rank, rank, child.records.start, child.records.stop)
        if route.parent is not None:
            self._send(rank, route.parent, route.own.start, route.own.stop)
            yield from self._receive(route.parent, rank, 0, len(buffer))
        for hop in route.hops:
            self._send(rank, hop.target, 0, hop.num_sent)
            yield from self._receive(hop.source, rank, hop.first, hop.stop)
        for child in route.children:
            self._send(rank, child.rank, 0, len(buffer))

    def _send(self, source: int, target: int, first: int, stop: int) -> None:
        self.messages.setdefault((source, target), deque()).append(self.buffers[source][first:stop])
        self.num_sent[source] += 1
        self.moved = True

    def _receive(self, source: int, target: int, first: int, stop: int):  # type: ignore[no-untyped-def]
        while not self.messages.get((source, target)):
            yield "waits"
        self.buffers[target][first:stop] = self.messages[source, target].popleft()
        self.num_received[target] += 1
        self.moved = True


@settings(max_examples=40)
@given(HOSTS)
def test_every_worker_has_every_record_where_its_route_says(hosts: Hosts) -> None:
    played = Played(hosts)
    ranks = list(range(len(played.routes)))
    assert not any(played.messages.values())
    for rank, buffer in played.buffers.items():
        assert [buffer[place] for place in played.routes[rank].places] == ranks


@settings(max_examples=40)
@given(HOSTS)
def test_no_worker_has_more_messages_than_its_tree_and_the_rounds_between_hosts(hosts: Hosts) -> None:
    played, rounds = Played(hosts), math.ceil(math.log2(len(hosts)))
    for members in hosts:
        for place, rank in enumerate(members):
            most = FANOUT + (rounds if place == 0 else 1)
            assert max(played.num_sent[rank], played.num_received[rank]) <= most
