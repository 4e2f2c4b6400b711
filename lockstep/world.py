"""Who takes part: the workers of one generation, seen from one of them."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class World:
    """One worker's place among the workers of one generation.

    `rank` counts workers over all hosts, `local_rank` on this host. A world of one worker is an
    ordinary world.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    generation: int = 0
    spans_hosts: bool = False
    """Whether workers on other hosts may come, however many there are here now."""

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The ranks of all other workers."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    @property
    def on_one_host(self) -> bool:
        """Whether all workers are on this host, now and later."""
        return self.local_size == self.size and not self.spans_hosts
