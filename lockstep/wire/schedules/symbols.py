"""Sums as symbols: who is in them and how they are bracketed, without any numbers."""

from lockstep.lanes import Branch, Fold, Tree


class Symbol:
    """A contribution, or the sum of two symbols. Made by `Symbols` only, so that equal sums are the same object."""

    __slots__ = ("left", "members", "name", "right")

    def __init__(self, members: int, name: int, left: "Symbol | None" = None, right: "Symbol | None" = None) -> None:
        self.members = members
        self.name = name
        self.left = left
        self.right = right

    def __str__(self) -> str:
        return f"({self.left}+{self.right})" if self.left and self.right else str(self.name)


class Symbols:
    """Makes every symbol once. `a + b` and `b + a` are one symbol, as they are the same bits; brackets count."""

    def __init__(self) -> None:
        self._contributions: dict[int, Symbol] = {}
        self._sums: dict[tuple[int, int], Symbol] = {}

    def contribution(self, name: int) -> Symbol:
        return self._contributions.setdefault(name, Symbol(1 << name, name))

    def add(self, left: Symbol, right: Symbol) -> Symbol:
        """The sum of two symbols without a common contribution; the one with the lowest is written first."""
        if left.members & -left.members > right.members & -right.members:
            left, right = right, left
        key = (id(left), id(right))
        if key not in self._sums:
            self._sums[key] = Symbol(left.members | right.members, -1, left, right)
        return self._sums[key]

    def sum_of_lanes(self, tree: Tree) -> Symbol:
        """The sum of a tree whose leaves are lanes."""
        if isinstance(tree, Branch):
            return self.add(self.sum_of_lanes(tree.left), self.sum_of_lanes(tree.right))
        assert isinstance(tree, int)
        return self.contribution(tree)

    def roots(self, fold: Fold) -> list[Symbol]:
        """What remains on the stack of a worker after its fold. See `lanes.Fold`."""
        stack: list[Symbol] = []
        for lane, merges in zip(fold.lanes, fold.merges, strict=True):
            stack.append(self.contribution(lane))
            for _ in range(merges):
                right = stack.pop()
                stack.append(self.add(stack.pop(), right))
        return stack
