"""How long peers have been silent, by what has moved from and to them."""

from collections.abc import Iterable


class Silence:
    """Whoever moves something counts it in `moved`; whoever looks from time to time notes what has changed."""

    def __init__(self, peers: Iterable[int]) -> None:
        self.moved = dict.fromkeys(peers, 0)
        self._noted = dict(self.moved)
        self._heard_s = dict.fromkeys(self.moved, float("-inf"))

    def note(self, now_s: float) -> None:
        for peer, moved in self.moved.items():
            if self._noted[peer] != moved:
                self._noted[peer], self._heard_s[peer] = moved, now_s

    def lasts_s(self, peers: Iterable[int], since_s: float, now_s: float) -> float:
        """How long none of these peers was heard, as noted, counted from `since_s` at the earliest."""
        return now_s - max(since_s, *(self._heard_s[peer] for peer in peers))
