"""One global batch as one worker holds it: how large it is everywhere, and the shares of the lanes here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

from lockstep.data import structure
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

    A lane has `least` samples of it, if there are as many (Note [No lane with a single sample] in lanes.py).
    `position` is that of the batch itself, counted from 0, and `loader` the number of the run's loader that it came
    from; None where the batch did not come from a loader. `reload_lanes` loads shares of it again. `digest` is that of
    its sample indices, and `drawn` what the loader's `drawn` was before it; empty where there is no loader.
    """

    num_samples: int
    shares: Mapping[int, Any] = field(repr=False)
    position: Position | None = None
    loader: int | None = None
    reload_lanes: Callable[[Sequence[int]], Mapping[int, Any]] | None = field(default=None, repr=False)
    digest: str = ""
    drawn: str = field(default="", repr=False)
    least: int = 1
    whole: Any = field(default=None, repr=False)
    """The batch that it was cut from, where this worker holds that."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shares", MappingProxyType(dict(self.shares)))

    @property
    def begins_pass(self) -> bool:
        """Whether it is the first batch of a pass over a loader."""
        return self.position is not None and self.position.step == 0

    @classmethod
    def cut(cls, batch: Any, num_lanes: int, lanes: Sequence[int], least: int = 1) -> "GlobalBatch":
        """The shares of `lanes`, cut from a batch that every worker holds whole."""
        num_samples = structure.num_samples(batch)
        shares_of = partial(cut_shares, batch, num_samples, num_lanes, least=least)
        return cls(num_samples, shares_of(lanes), reload_lanes=shares_of, least=least, whole=batch)

    def for_lanes(self, lanes: Sequence[int]) -> "GlobalBatch":
        """The same batch with the shares of `lanes`: shares that are held are kept, the rest is loaded.

        What is loaded is, bit for bit, what any other worker would have. See Note [The same batch again].
        """
        missing = [lane for lane in lanes if lane not in self.shares]
        held = {**self.shares, **(self._loaded(missing) if missing else {})}
        return replace(self, shares={lane: held[lane] for lane in lanes if lane in held})

    def reload(self, lanes: Sequence[int]) -> "GlobalBatch":
        """The same batch with the shares of `lanes`, all loaded again: user code may have written to the others."""
        return replace(self, shares=self._loaded(lanes))

    def _loaded(self, lanes: Sequence[int]) -> Mapping[int, Any]:
        if self.reload_lanes is None:
            raise Misuse(
                f"lanes {', '.join(map(str, lanes))} of this global batch are not here, and it does not know where "
                "they come from: take it from a loader of run.shard, or make it with GlobalBatch.cut"
            )
        return self.reload_lanes(lanes)

    def to(self, *_: Any, **__: Any) -> "GlobalBatch":
        """The batch itself: its lanes arrive on the run's device. For trainers that move every batch themselves."""
        return self

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


def cut_shares(batch: Any, num_samples: int, num_lanes: int, lanes: Sequence[int], least: int) -> dict[int, Any]:
    """What each of `lanes` takes of a whole batch; lanes without samples are absent."""
    positions = {lane: share(num_samples, lane, num_lanes, least) for lane in lanes}
    return {lane: structure.take(batch, taken) for lane, taken in positions.items() if taken}
