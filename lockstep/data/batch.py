"""One global batch as one worker holds it: how large it is everywhere, and the shares of the lanes here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

from lockstep.data import cut
from lockstep.errors import Misuse
from lockstep.lanes import share


@dataclass(frozen=True, order=True)
class Position:
    """A place in the training data: so many passes finished, so many batches into the running one."""

    epoch: int = 0
    step: int = 0


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """`num_samples` of the whole batch, and the data of those of this worker's lanes that are not empty.

    `position` is that of the batch itself, counted from 0, and `loader` the number of the run's loader that it came
    from; None where the batch did not come from a loader.
    """

    num_samples: int
    shares: Mapping[int, Any] = field(repr=False)
    position: Position | None = None
    loader: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shares", MappingProxyType(dict(self.shares)))

    @classmethod
    def cut(cls, batch: Any, num_lanes: int, lanes: Sequence[int]) -> "GlobalBatch":
        """The shares of `lanes`, cut from a batch that every worker holds whole."""
        num_samples = cut.num_samples(batch)
        return cls(num_samples, cut_shares(batch, num_samples, num_lanes, lanes))

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise Misuse(
            "a global batch is spread over the workers, this one holds only its own lanes of it: "
            "write `for x, y in run.lanes(batch): ...`"
        )


def cut_shares(batch: Any, num_samples: int, num_lanes: int, lanes: Sequence[int]) -> dict[int, Any]:
    """What each of `lanes` takes of a whole batch; lanes without samples are absent."""
    positions = {lane: share(num_samples, lane, num_lanes) for lane in lanes}
    return {lane: cut.take(batch, taken) for lane, taken in positions.items() if taken}
