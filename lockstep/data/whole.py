"""Loading items that each are a whole global batch already (batch_size=None): read everywhere, then cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.chance import set_cpu_generators
from lockstep.data.batch import Position, cut_shares
from lockstep.data.cut import num_samples
from lockstep.data.fetch import Fetch, Loaded, Source
from lockstep.data.order import Draw
from lockstep.data.samples import sample_names


@dataclass(frozen=True)
class WholeRequest:
    draw: Draw
    lanes: tuple[int, ...]
    least: int


class WholeFetch(Fetch):
    """Reads one item of the data set for each global batch and keeps the shares of the lanes asked for."""

    counts_uses = True

    def request(self, draw: Draw, lanes: Sequence[int], least: int = 1) -> WholeRequest:
        return WholeRequest(draw, tuple(lanes), least)

    def load(self, request: WholeRequest) -> Loaded:
        draw, source = request.draw, self.source
        names = sample_names(draw.indices, draw.uses)
        set_cpu_generators(source.keys.of("augment", draw.position.epoch, *names))
        return shares_of_whole(source, source.dataset[draw.indices[0]], draw.position, request.lanes, request.least)


def shares_of_whole(source: Source, item: Any, position: Position, lanes: Sequence[int], least: int) -> Loaded:
    """An item that is a whole global batch, converted by the user's collate function and cut."""
    batch = source.collate(item, position.epoch, position.step)
    total = num_samples(batch)
    return total, cut_shares(batch, total, source.num_lanes, lanes, least)
