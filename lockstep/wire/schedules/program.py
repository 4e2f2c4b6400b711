"""What one worker does to run a schedule: every value has a place before the first byte moves.

# Note [Places]
# A worker's values of one part are in the running value, in one of its own roots, or in a cell of scratch memory. A
# cell is as large as the largest part, and is used again as soon as its value was needed for the last time, so a
# program needs few of them. A running value is received in its own place, unless the value that it replaces is still
# being sent or still needed; then it is received in a cell.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lockstep.errors import BadArgument
from lockstep.lanes import Branch, Root, Tree, leaves
from lockstep.wire.schedules.schedule import AddPart, Schedule, ScheduleRound, SendPart


@dataclass(frozen=True)
class ValuePlace:
    """The place of a value. `index` is the number of the root or cell."""

    kind: Literal["running", "root", "cell"]
    index: int = 0


RUNNING = ValuePlace("running")


@dataclass(frozen=True)
class PartMessage:
    """Part `part` goes from `place` to worker `peer`, or comes from it to `place`."""

    peer: int
    part: int
    place: ValuePlace


@dataclass(frozen=True)
class Addition:
    """The sum of `left` and `right` goes to `into`; without `right` it is a copy. `into` may be one of them."""

    part: int
    left: ValuePlace
    right: ValuePlace | None
    into: ValuePlace


@dataclass(frozen=True)
class Step:
    """What a worker does in one round: all messages at once, then the additions in this order."""

    receives: tuple[PartMessage, ...]
    sends: tuple[PartMessage, ...]
    additions: tuple[Addition, ...]


@dataclass(frozen=True)
class WorkerProgram:
    """The rounds in which this worker has something to do, and how many cells they need."""

    steps: tuple[Step, ...]
    num_cells: int


def program(schedule: Schedule, rank: int, in_place: bool) -> WorkerProgram:
    """What worker `rank` does in the schedule. `in_place`: its first root and its running value share memory."""
    writer = _Writer(schedule, rank, in_place)
    steps = [writer.step(moves) for moves in schedule.at(rank)]
    busy = tuple(step for step in steps if step.receives or step.sends or step.additions)
    return WorkerProgram(busy, writer.cells.num_cells)


@dataclass
class _Cells:
    """Numbers of cells; the lowest free one is taken first."""

    num_cells: int = 0
    free: set[int] = field(default_factory=set)

    def take(self, besides: Sequence[ValuePlace | None] = ()) -> ValuePlace:
        """A free cell that is none of `besides`, which may be free already and yet about to be read."""
        possible = [number for number in self.free if ValuePlace("cell", number) not in besides]
        if possible:
            self.free.remove(min(possible))
            return ValuePlace("cell", min(possible))
        self.num_cells += 1
        return ValuePlace("cell", self.num_cells - 1)

    def give_back(self, place: ValuePlace | None) -> None:
        if place is not None and place.kind == "cell":
            self.free.add(place.index)


class _Writer:
    """Writes the program round by round; keeps the places of this worker's roots and how often they are needed."""

    def __init__(self, schedule: Schedule, rank: int, in_place: bool) -> None:
        self.cells = _Cells()
        self._rank = rank
        self._in_place = in_place
        self._num_roots = schedule.reduction.roots_of[rank] if schedule.reduction else 0
        self._places: dict[tuple[Root, int], ValuePlace] = {}
        self._uses = _uses(schedule.at(rank), rank)
        self._additions: list[Addition] = []

    def step(self, moves: ScheduleRound) -> Step:
        incoming = [send for send in moves.sends if send.target == self._rank]
        outgoing = [send for send in moves.sends if send.source == self._rank]
        sends = tuple(PartMessage(send.target, send.part, self._place(send.root, send.part)) for send in outgoing)
        spent = [self._use(send.root, send.part) for send in outgoing if send.root]
        receives = tuple(PartMessage(send.source, send.part, self._landing(send, sends)) for send in incoming)
        for place in spent:  # only now: a place that is being sent may not be overwritten
            self.cells.give_back(place)
        for send, message in zip(incoming, receives, strict=True):
            self._settle(send, message.place)
        for add in moves.adds:
            self._add(add)
        additions, self._additions = tuple(self._additions), []
        return Step(receives, sends, additions)

    # -- messages -------------------------------------------------------------------------------------------

    def _landing(self, send: SendPart, sends: Sequence[PartMessage]) -> ValuePlace:
        """See Note [Places]."""
        being_sent = any(message.place == RUNNING and message.part == send.part for message in sends)
        if send.root or send.adds or being_sent or self._lies_under_running(send.part):
            return self.cells.take()
        return RUNNING

    def _settle(self, send: SendPart, place: ValuePlace) -> None:
        """Records the received value as a root that is held, or as (part of) the running value."""
        if send.root:
            self._hold(send.root, send.part, place)
        elif send.adds:
            self._write(send.part, RUNNING, place, RUNNING)
            self.cells.give_back(place)
        elif place != RUNNING:
            self._write(send.part, place, None, RUNNING)
            self.cells.give_back(place)

    # -- additions ------------------------------------------------------------------------------------------

    def _add(self, add: AddPart) -> None:
        left, right = self._operands(add.tree, add.part)
        if add.root is None:
            self._write(add.part, left, right, RUNNING)
        else:
            into = self.cells.take()
            self._write(add.part, left, right, into)
            self._hold(add.root, add.part, into)

    def _operands(self, tree: Tree, part: int) -> tuple[ValuePlace, ValuePlace | None]:
        """The places whose sum is the tree's (one, for a single root). Frees cells that are not needed any more."""
        trees = (tree.left, tree.right) if isinstance(tree, Branch) else (tree,)
        values = [self._value(each, part) for each in trees]
        for place, last in values:
            self.cells.give_back(place if last else None)
        return values[0][0], values[1][0] if len(values) == 2 else None

    def _value(self, tree: Tree, part: int) -> tuple[ValuePlace, bool]:
        """The place of the tree's sum, and whether this is the last time that it is needed."""
        if isinstance(tree, Branch):
            left, right = self._operands(tree, part)
            into = self.cells.take()
            self._write(part, left, right, into)
            return into, True
        assert isinstance(tree, Root)
        place = self._place(tree, part)
        return place, self._use(tree, part) is not None

    def _write(self, part: int, left: ValuePlace, right: ValuePlace | None, into: ValuePlace) -> None:
        if into == RUNNING and self._lies_under_running(part):
            saved = self.cells.take(besides=(left, right))
            self._additions.append(Addition(part, RUNNING, None, saved))
            self._places[Root(self._rank, 0), part] = saved
        if right is not None or left != into:
            self._additions.append(Addition(part, left, right, into))

    # -- what is held ---------------------------------------------------------------------------------------

    def _place(self, root: Root | None, part: int) -> ValuePlace:
        if root is None:
            return RUNNING
        if (root, part) in self._places:
            return self._places[root, part]
        if root.rank != self._rank or root.index >= self._num_roots:
            raise BadArgument(
                f"the schedule is wrong: worker {self._rank} needs part {part} of root {root.index} of worker "
                f"{root.rank}, which it does not hold then"
            )
        return RUNNING if self._in_place and root.index == 0 else ValuePlace("root", root.index)

    def _hold(self, root: Root, part: int, place: ValuePlace) -> None:
        self._places[root, part] = place
        if self._uses[root, part] == 0:
            self.cells.give_back(place)

    def _use(self, root: Root | None, part: int) -> ValuePlace | None:
        """Counts one use; returns the place if it was the last one."""
        if root is None:
            return None
        self._uses[root, part] -= 1
        return self._place(root, part) if self._uses[root, part] == 0 else None

    def _lies_under_running(self, part: int) -> bool:
        """Whether writing the running value would destroy a root that is needed later."""
        first = Root(self._rank, 0)
        return self._in_place and (first, part) not in self._places and self._uses[first, part] > 0


def _uses(rounds: Sequence[ScheduleRound], rank: int) -> Counter[tuple[Root, int]]:
    """How often this worker sends or adds each part of each root."""
    uses: Counter[tuple[Root, int]] = Counter()
    for moves in rounds:
        uses.update((send.root, send.part) for send in moves.sends if send.source == rank and send.root)
        uses.update((leaf, add.part) for add in moves.adds for leaf in leaves(add.tree) if isinstance(leaf, Root))
    return uses
