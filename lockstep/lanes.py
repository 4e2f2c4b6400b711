"""Lanes: which samples each takes, who carries them, and the one order in which they are added.

Everything here is pure: values in, values out, nothing imported from torch.

# Note [The summation tree]
# A run with V lanes has one binary tree over the lane indices: a node covers lanes [lo, hi), where lo is a
# multiple of a power of two, and splits at the largest power of two below its size. The step's gradient is
# the sum of the lanes' weighted gradients bracketed by this tree. Floating-point addition is commutative but
# not associative, so the brackets alone decide the bits; who adds which node does not matter. A lane
# without samples is absent: its parent is then its sibling, unchanged, not "sibling + 0".

# Note [No lane with a single sample]
# A model may need more than one sample at a time: batch norm has no statistics of one. A batch of N samples is then cut
# into P = min(V, N // least) parts, as evenly as V parts would be, and P of the V lanes have one each, spread over the
# lane indices as P samples would be. With N >= least·V every lane has a part, the same as with `least` 1.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from lockstep.errors import BadArgument


def share(num_samples: int, lane: int, num_lanes: int, least: int = 1) -> range:
    """The positions in a global batch of `num_samples` that belong to `lane`: none, or `least` if there are as many.

    See Note [No lane with a single sample].
    """
    parts = max(1, min(num_lanes, num_samples // least))
    first, last = parts * lane // num_lanes, parts * (lane + 1) // num_lanes
    return range(num_samples * first // parts, num_samples * last // parts)


@lru_cache(maxsize=256)
def present_lanes(num_samples: int, num_lanes: int, least: int = 1) -> tuple[int, ...]:
    """The lanes that hold samples of a global batch of `num_samples`, `least` each if there are as many."""
    return tuple(lane for lane in range(num_lanes) if share(num_samples, lane, num_lanes, least))


@dataclass(frozen=True)
class Assignment:
    """Which worker carries which lanes: every lane exactly once; a worker may carry none."""

    lanes_of: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        carried = sorted(lane for lanes in self.lanes_of for lane in lanes)
        if not carried or carried != list(range(len(carried))):
            raise BadArgument(f"an assignment must carry every lane from 0 on exactly once: {_misdealt(carried)}")

    @cached_property
    def most_lanes(self) -> int:
        """How many lanes the worker carries that has the most."""
        return max(map(len, self.lanes_of))

    @classmethod
    def even(cls, num_lanes: int, num_workers: int) -> "Assignment":
        """Contiguous lanes, as evenly as possible; with more workers than lanes some carry none."""
        if num_lanes < 1:
            raise BadArgument(f"lanes must be at least 1, not {num_lanes}")
        return cls(tuple(tuple(share(num_lanes, rank, num_workers)) for rank in range(num_workers)))

    @classmethod
    def dealt(
        cls,
        num_lanes: int,
        slots: Sequence[int],
        by_hand: Sequence[Sequence[int]] | None = None,
    ) -> "Assignment":
        """The lanes of workers known by their slots, in order.

        Evenly; or, where each slot was given its lanes by hand, as given: the lanes of a slot that is missing go one by
        one to the worker that has the fewest.
        """
        if by_hand is None:
            return cls.even(num_lanes, len(slots))
        lanes = _filled_up({slot: _given(by_hand, slot) for slot in slots}, num_lanes)
        return cls.explicit(lanes[slot] for slot in slots)

    @classmethod
    def explicit(cls, lanes_of: Iterable[Iterable[int]]) -> "Assignment":
        """The given lanes for each worker, computed in ascending order."""
        return cls(tuple(tuple(sorted(lanes)) for lanes in lanes_of))

    def without(self, ranks: Collection[int]) -> "Assignment":
        """The others carry what they carry, and the lanes of these `ranks` too, which have none."""
        others = {rank: lanes for rank, lanes in enumerate(self.lanes_of) if rank not in ranks}
        lanes = _filled_up(others, self.num_lanes)
        return self.explicit(lanes.get(rank, ()) for rank in range(self.num_workers))

    @cached_property
    def num_lanes(self) -> int:
        return sum(len(lanes) for lanes in self.lanes_of)

    @property
    def num_workers(self) -> int:
        return len(self.lanes_of)

    def carriers(self) -> dict[int, int]:
        """The rank of the worker that carries each lane."""
        return {lane: rank for rank, lanes in enumerate(self.lanes_of) for lane in lanes}


def _given(by_hand: Sequence[Sequence[int]], slot: int) -> tuple[int, ...]:
    return tuple(by_hand[slot]) if slot < len(by_hand) else ()


def _filled_up(lanes_of: dict[int, tuple[int, ...]], num_lanes: int) -> dict[int, tuple[int, ...]]:
    """The lanes that nobody has go one by one to the worker that has the fewest, the lowest slot first."""
    carried = {lane for lanes in lanes_of.values() for lane in lanes}
    for lane in range(num_lanes):
        if lane not in carried:
            fewest = min(lanes_of, key=lambda slot: (len(lanes_of[slot]), slot))
            lanes_of[fewest] = (*lanes_of[fewest], lane)
    return lanes_of


@dataclass(frozen=True)
class Branch:
    """A node of a summation tree: `left + right`."""

    left: "Tree"
    right: "Tree"


@dataclass(frozen=True)
class Root:
    """The sum that worker `rank` hands to the wire as its `index`-th: a whole subtree of lanes."""

    rank: int
    index: int


Tree = int | Root | Branch
"""A lane, a worker's root, or the sum of two trees."""


def lane_tree(num_lanes: int, present: Collection[int]) -> Tree | None:
    """The summation tree of a run, restricted to the lanes that are present. See Note [The summation tree]."""

    def node(lo: int, hi: int) -> Tree | None:
        if hi - lo == 1:
            return lo if lo in present else None
        middle = lo + (1 << (hi - lo - 1).bit_length() - 1)
        left, right = node(lo, middle), node(middle, hi)
        if left is None or right is None:
            return right if left is None else left
        return Branch(left, right)

    return node(0, num_lanes)


@dataclass(frozen=True)
class Fold:
    """What one worker does with its lanes: a program for a stack of gradient buffers.

    The worker computes `lanes` in this order. After lane `i` its gradient goes on the stack, and then
    `merges[i]` times the two topmost entries are replaced by their sum. What remains on the stack, from the
    bottom, are the worker's roots.
    """

    lanes: tuple[int, ...]
    merges: tuple[int, ...]

    @property
    def num_roots(self) -> int:
        return len(self.lanes) - sum(self.merges)

    @property
    def depth(self) -> int:
        """How many buffers the stack needs: a lane that is merged at once needs none of its own."""
        height = deepest = 0
        for merges in self.merges:
            height += 1 if merges == 0 else 1 - merges
            deepest = max(deepest, height)
        return deepest


@dataclass(frozen=True)
class Reduction:
    """The whole sum of a step: what each worker folds, and the tree in which the wire adds the roots."""

    folds: tuple[Fold, ...]
    tree: Tree

    @property
    def roots_of(self) -> tuple[int, ...]:
        return tuple(fold.num_roots for fold in self.folds)


@lru_cache(maxsize=256)
def reduction(assignment: Assignment, present: tuple[int, ...]) -> Reduction:
    """Cuts the summation tree at the largest subtrees that one worker carries whole."""
    if not present:
        raise BadArgument("a step needs at least one lane with samples")
    whole = lane_tree(assignment.num_lanes, frozenset(present))
    assert whole is not None
    carrier = assignment.carriers()
    merges = dict.fromkeys(present, 0)
    num_roots = [0] * assignment.num_workers

    def cut(tree: Tree) -> Tree:
        rank = _only_carrier(tree, carrier)
        if rank is not None:
            _count_merges(tree, merges)
            num_roots[rank] += 1
            return Root(rank, num_roots[rank] - 1)
        assert isinstance(tree, Branch)
        return Branch(cut(tree.left), cut(tree.right))

    wire_tree = cut(whole)
    folds = tuple(_fold(lanes, present, merges) for lanes in assignment.lanes_of)
    return Reduction(folds, wire_tree)


def renamed(tree: Tree, names: Mapping[Root, int]) -> Tree:
    """The same brackets over numbers instead of roots: all trees of one shape become equal."""
    if isinstance(tree, Branch):
        return Branch(renamed(tree.left, names), renamed(tree.right, names))
    assert isinstance(tree, Root)
    return names[tree]


def leaves(tree: Tree) -> list[int | Root]:
    """The leaves of a tree, from left to right."""
    return leaves(tree.left) + leaves(tree.right) if isinstance(tree, Branch) else [tree]


def _only_carrier(tree: Tree, carrier: dict[int, int]) -> int | None:
    ranks = {carrier[lane] for lane in leaves(tree) if isinstance(lane, int)}
    return ranks.pop() if len(ranks) == 1 else None


def _count_merges(tree: Tree, merges: dict[int, int]) -> None:
    """A branch is added up as soon as its last lane is there: one merge after its rightmost leaf."""
    if isinstance(tree, Branch):
        _count_merges(tree.left, merges)
        _count_merges(tree.right, merges)
        last = leaves(tree)[-1]
        assert isinstance(last, int)
        merges[last] += 1


def _fold(lanes: Sequence[int], present: Collection[int], merges: dict[int, int]) -> Fold:
    carried = tuple(lane for lane in sorted(lanes) if lane in present)
    return Fold(carried, tuple(merges[lane] for lane in carried))


def _misdealt(carried: Sequence[int]) -> str:
    """What is wrong with these lanes, sorted."""
    again = next((lane for lane, after in pairwise(carried) if lane == after), None)
    if again is not None:
        return f"lane {again} stands there twice"
    missing = next((lane for lane, found in enumerate(carried) if lane != found), None)
    return "it has none" if missing is None else f"lane {missing} is missing, and lane {carried[-1]} is there"
