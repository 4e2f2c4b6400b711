"""Which message belongs to which receive: by source and tag, in order.

# Note [Matching]
# A message belongs to the first receive posted with its tag that takes messages of its source. Its bytes go straight to
# that receive's tensor. If there is none yet they are kept aside, in private memory, and the first such receive that is
# posted takes the first such message, even one of which only a part has arrived: the rest then goes straight.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch

from lockstep.errors import Disagreement
from lockstep.wire.shared.channel import Chunk, copy
from lockstep.wire.shared.transfers import Receiving

_Item = TypeVar("_Item")


@dataclass(eq=False)
class ArrivingMessage:
    """A message of which `arrived` bytes are here, at `place`; without a place its bytes are dropped."""

    source: int
    tag: int
    num_bytes: int
    arrived: int = 0
    place: int | None = None
    receiving: Receiving | None = None
    kept: torch.Tensor | None = None

    @property
    def is_whole(self) -> bool:
        return self.arrived == self.num_bytes

    def add(self, chunk: Chunk) -> None:
        if self.place is not None:
            copy(self.place + self.arrived, chunk.address, chunk.num_bytes)
        self.arrived += chunk.num_bytes

    def keep(self) -> None:
        """What arrives is kept until somebody asks for it."""
        self.kept = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")
        self.place = self.kept.data_ptr()

    def hand_to(self, receiving: Receiving) -> None:
        """What has arrived is in the receive's tensor, and the rest will go there."""
        if self.place is not None:
            copy(receiving.address, self.place, self.arrived)
        self.receiving, self.place, self.kept = receiving, receiving.address, None

    def drop(self) -> None:
        self.receiving = self.place = self.kept = None


class Matching:
    """Receives that wait for messages, and messages that wait for receives. One thread at a time."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._posted: dict[int, list[Receiving]] = {}
        self._aside: dict[int, list[ArrivingMessage]] = {}
        self._arriving: dict[tuple[int, int], ArrivingMessage] = {}

    def post(self, receiving: Receiving) -> bool:
        """The receive takes a message that was kept aside, or waits for one. Whether that ended it."""
        aside = self._aside.get(receiving.tag, [])
        arrival = next((arrival for arrival in aside if arrival.source in receiving.peers), None)
        if arrival is None:
            self._posted.setdefault(receiving.tag, []).append(receiving)
            return False
        _remove(self._aside, receiving.tag, arrival)
        return not self._join(arrival, receiving) or arrival.is_whole

    def withdraw(self, receiving: Receiving) -> None:
        """The receive takes nothing any more; the rest of a message that it has begun to take is dropped."""
        if receiving in self._posted.get(receiving.tag, ()):
            _remove(self._posted, receiving.tag, receiving)
        for arrival in self._arriving.values():
            if arrival.receiving is receiving:
                arrival.drop()

    def take(self, source: int, chunk: Chunk) -> Receiving | None:
        """The chunk's bytes are where they belong. Gives the receive that this ended, if it did."""
        refused = None
        arrival = self._arriving.get((source, chunk.tag))
        if arrival is None:
            arrival, refused = self._begin(source, chunk)
        arrival.add(chunk)
        if not arrival.is_whole:
            self._arriving[source, chunk.tag] = arrival
            return refused
        self._arriving.pop((source, chunk.tag), None)
        return refused or arrival.receiving

    def _begin(self, source: int, chunk: Chunk) -> tuple[ArrivingMessage, Receiving | None]:
        """A message begins, in its place; with the receive that refused it, if one did."""
        arrival = ArrivingMessage(source, chunk.tag, chunk.message_bytes)
        posted = self._posted.get(chunk.tag, [])
        receiving = next((receiving for receiving in posted if source in receiving.peers), None)
        if receiving is None:
            arrival.keep()
            self._aside.setdefault(chunk.tag, []).append(arrival)
            return arrival, None
        _remove(self._posted, chunk.tag, receiving)
        return arrival, None if self._join(arrival, receiving) else receiving

    def _join(self, arrival: ArrivingMessage, receiving: Receiving) -> bool:
        """The receive takes the message, or refuses it because the sizes differ."""
        receiving.source = arrival.source
        if arrival.num_bytes == receiving.num_bytes:
            arrival.hand_to(receiving)
            return True
        arrival.drop()
        receiving.error = Disagreement(
            f"bytes of a message with tag {receiving.tag}",
            here=self._rank,
            mine=str(receiving.num_bytes),
            there=arrival.source,
            theirs=str(arrival.num_bytes),
        )
        return False


def _remove(lists: dict[int, list[_Item]], tag: int, item: _Item) -> None:
    lists[tag].remove(item)
    if not lists[tag]:
        del lists[tag]
