"""The proof that a schedule does what its collective promises, by executing it on symbols."""

from collections import Counter
from dataclasses import dataclass
from typing import NoReturn

from lockstep.lanes import Branch, Fold, Root, Tree, lane_tree
from lockstep.wire.schedules.schedule import AddPart, Schedule, ScheduleRound, SendPart

AT_THE_END = "after the last round"


@dataclass(frozen=True)
class Proof:
    """The rounds of a schedule that is right, and how many parts each worker sends in them."""

    rounds: int
    num_parts: int
    parts_sent_by: tuple[int, ...]

    @property
    def most_parts_sent(self) -> int:
        return max(self.parts_sent_by)

    def most_bytes_sent(self, num_bytes: int) -> float:
        """The most that any one worker sends, for a message of `num_bytes` in equal parts."""
        return self.most_parts_sent * num_bytes / self.num_parts


def prove(schedule: Schedule) -> Proof:
    """Shows that the schedule is right, or raises `WrongSchedule` with the round, the worker and the part.

    No worker sends or adds what it does not hold. No two sends of a round write the same place. Every result that the
    collective demands has every contribution exactly once. All workers' results have the same brackets; with a
    reduction, those of the summation tree over its lanes.
    """
    execution = SymbolicExecution(schedule)
    for moves in schedule.rounds:
        execution.play(moves)
    check_results(execution)
    sent = Counter(send.source for moves in schedule.rounds for send in moves.sends)
    return Proof(len(schedule.rounds), schedule.num_parts, tuple(sent[rank] for rank in range(schedule.num_workers)))


# -- sums as symbols -----------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Symbol:
    """A contribution, or the sum of two symbols. Only `Symbols` makes them, so that equal sums are the same object."""

    members: int
    name: int
    left: "Symbol | None" = None
    right: "Symbol | None" = None

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


# -- a schedule on symbols -----------------------------------------------------------------------------------


class WrongSchedule(AssertionError):  # noqa: N818
    """A schedule that does not do what its collective promises."""

    def __init__(self, moment: str, worker: int, part: int, problem: str) -> None:
        super().__init__(f"{moment}: worker {worker}, part {part}: {problem}")
        self.moment, self.worker, self.part, self.problem = moment, worker, part, problem


class SymbolicExecution:
    """What every worker of a schedule holds after every round. See Note [What a worker holds] in schedule.py.

    `running[worker][part]` is the running value, `roots[worker][root, part]` are the roots. `play` executes one round
    and raises `WrongSchedule` at a move that cannot be made, or that would count a contribution twice.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.symbols = Symbols()
        self.running: list[list[Symbol | None]] = [self._running_at_first(rank) for rank in self._workers]
        self.roots: list[dict[tuple[Root, int], Symbol]] = [self._roots_at_first(rank) for rank in self._workers]
        self._round = 0

    @property
    def _workers(self) -> range:
        return range(self.schedule.num_workers)

    def _running_at_first(self, rank: int) -> list[Symbol | None]:
        own, parts = self.symbols.contribution(rank), range(self.schedule.num_parts)
        if self.schedule.collective == "broadcast":
            return [own if rank == self.schedule.source else None for _ in parts]
        if self.schedule.collective == "all_gather":
            return [own if rank == part else None for part in parts]
        return [None if self.schedule.exact else own for _ in parts]

    def _roots_at_first(self, rank: int) -> dict[tuple[Root, int], Symbol]:
        if self.schedule.reduction is None:
            return {}
        own = self.symbols.roots(self.schedule.reduction.folds[rank])
        parts = range(self.schedule.num_parts)
        return {(Root(rank, index), part): symbol for index, symbol in enumerate(own) for part in parts}

    def play(self, moves: ScheduleRound) -> None:
        self._round += 1
        self._check(moves)
        sent = [self._read(send) for send in moves.sends]
        for send, symbol in zip(moves.sends, sent, strict=True):
            self._arrive(send, symbol)
        sums = [self._value(add.tree, add) for add in moves.adds]
        for add, symbol in zip(moves.adds, sums, strict=True):
            self._hold(add.worker, add.part, add.root, symbol)

    def _check(self, moves: ScheduleRound) -> None:
        """Raises unless all workers and parts exist, and no two sends or additions write the same place."""
        for send in moves.sends:
            self._check_exists(send.source, send.part)
            self._check_exists(send.target, send.part)
            if send.source == send.target:
                self._refuse(send.source, send.part, "sends to itself")
        for add in moves.adds:
            self._check_exists(add.worker, add.part)
        self._check_once([(send.target, send.part, send.root) for send in moves.sends])
        self._check_once([(add.worker, add.part, add.root) for add in moves.adds])

    def _check_exists(self, worker: int, part: int) -> None:
        if not 0 <= worker < self.schedule.num_workers:
            self._refuse(worker, part, f"there are only workers 0 to {self.schedule.num_workers - 1}")
        if not 0 <= part < self.schedule.num_parts:
            self._refuse(worker, part, f"there are only parts 0 to {self.schedule.num_parts - 1}")

    def _check_once(self, places: list[tuple[int, int, Root | None]]) -> None:
        if len(set(places)) < len(places):
            worker, part, root = Counter(places).most_common(1)[0][0]
            self._refuse(worker, part, f"{_name(root)} is written twice")

    def _read(self, send: SendPart) -> Symbol:
        held = self._held(send.source, send.part, send.root)
        if held is None:
            self._refuse(send.source, send.part, f"sends {_name(send.root)} to worker {send.target} without having it")
        return held

    def _held(self, worker: int, part: int, root: Root | None) -> Symbol | None:
        return self.running[worker][part] if root is None else self.roots[worker].get((root, part))

    def _arrive(self, send: SendPart, symbol: Symbol) -> None:
        if send.adds:
            own = self._held(send.target, send.part, send.root)
            if own is None or send.root is not None:
                problem = f"{_name(send.root)} from worker {send.source} can only be added to a running value"
                self._refuse(send.target, send.part, problem)
            symbol = self._sum(own, symbol, send.target, send.part)
        self._hold(send.target, send.part, send.root, symbol)

    def _hold(self, worker: int, part: int, root: Root | None, symbol: Symbol) -> None:
        if root is None:
            self.running[worker][part] = symbol
        elif self.roots[worker].setdefault((root, part), symbol) is not symbol:
            self._refuse(worker, part, f"{_name(root)} is the name of two different sums")

    def _value(self, tree: Tree, add: AddPart) -> Symbol:
        if isinstance(tree, Branch):
            return self._sum(self._value(tree.left, add), self._value(tree.right, add), add.worker, add.part)
        held = self.roots[add.worker].get((tree, add.part)) if isinstance(tree, Root) else None
        if held is None:
            self._refuse(add.worker, add.part, f"adds {tree} without having it")
        return held

    def _sum(self, left: Symbol, right: Symbol, worker: int, part: int) -> Symbol:
        if left.members & right.members:
            self._refuse(worker, part, f"adds {left} and {right}, which count a contribution twice")
        return self.symbols.add(left, right)

    def _refuse(self, worker: int, part: int, problem: str) -> NoReturn:
        raise WrongSchedule(f"round {self._round}", worker, part, problem)


def _name(root: Root | None) -> str:
    return "the running value" if root is None else f"root {root.index} of worker {root.rank}"


# -- the results ---------------------------------------------------------------------------------------------


def check_results(execution: SymbolicExecution) -> None:
    """Raises `WrongSchedule` unless the running values are what the collective promises."""
    parts, workers = range(execution.schedule.num_parts), range(execution.schedule.num_workers)
    match execution.schedule.collective:
        case "all_reduce":
            _check_sums(execution, {part: list(workers) for part in parts})
        case "reduce_scatter":
            _check_sums(execution, {part: [part] for part in parts})
        case "all_gather":
            _check_copies(execution, list(parts))
        case "broadcast":
            _check_copies(execution, [execution.schedule.source for _ in parts])


def _check_copies(execution: SymbolicExecution, owners: list[int]) -> None:
    """Every worker has each part as its owner had it."""
    for worker, running in enumerate(execution.running):
        for part, (value, owner) in enumerate(zip(running, owners, strict=True)):
            if value is not execution.symbols.contribution(owner):
                raise WrongSchedule(AT_THE_END, worker, part, f"holds {value} instead of what worker {owner} had")


def _check_sums(execution: SymbolicExecution, holders_of: dict[int, list[int]]) -> None:
    """The workers that must hold each part have the whole sum of it, in the right brackets."""
    reduction, in_tree = execution.schedule.reduction, None
    contributions = (1 << execution.schedule.num_workers) - 1  # the bits of all workers
    if reduction is not None:
        # In an exact schedule, of all lanes that are present. Those after the last of them do not change the tree.
        present = frozenset(lane for fold in reduction.folds for lane in fold.lanes)
        contributions = sum(1 << lane for lane in present)
        tree = lane_tree(max(present) + 1, present)
        assert tree is not None
        in_tree = execution.symbols.sum_of_lanes(tree)
    for part, holders in holders_of.items():
        at_first_holder = execution.running[holders[0]][part]
        for worker in holders:
            value = execution.running[worker][part]
            if value is None or value.members != contributions:
                raise WrongSchedule(AT_THE_END, worker, part, f"{value} does not have every contribution")
            if value is not at_first_holder:
                problem = f"{value} has other brackets than {at_first_holder} on worker {holders[0]}"
                raise WrongSchedule(AT_THE_END, worker, part, problem)
            if in_tree is not None and value is not in_tree:
                raise WrongSchedule(
                    AT_THE_END, worker, part, f"{value} has other brackets than the summation tree, {in_tree}"
                )
