"""The keys of all chance in one loader."""

from dataclasses import dataclass

from lockstep.chance import fold


@dataclass(frozen=True)
class Keys:
    """Makes the keys of the `index`-th loader of a run. See Note [Keys] in lockstep/chance.py."""

    seed: int
    index: int

    def of(self, use: str, *path: str | int) -> int:
        return fold(self.seed, use, self.index, *path)
