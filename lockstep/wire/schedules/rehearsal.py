"""A schedule carried out on symbols: what every worker holds after every round, and that each move is possible."""

from collections import Counter
from typing import NoReturn

from lockstep.lanes import Branch, Root, Tree
from lockstep.wire.schedules.schedule import Add, Round, Schedule, Send
from lockstep.wire.schedules.symbols import Symbol, Symbols


class Wrong(AssertionError):  # noqa: N818
    """A schedule that does not do what its collective promises."""

    def __init__(self, moment: str, worker: int, part: int, problem: str) -> None:
        super().__init__(f"{moment}: worker {worker}, part {part}: {problem}")
        self.moment, self.worker, self.part, self.problem = moment, worker, part, problem


class Rehearsal:
    """The workers of a schedule and what each holds. See Note [What a worker holds] in schedule.py.

    `running[worker][part]` is the running value, `roots[worker][root, part]` are the roots. `play` carries out
    one round and raises `Wrong` at a move that cannot be made, or that would count a contribution twice.
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

    def play(self, moves: Round) -> None:
        """Carries out the next round."""
        self._round += 1
        self._check(moves)
        sent = [self._read(send) for send in moves.sends]
        for send, symbol in zip(moves.sends, sent, strict=True):
            self._arrive(send, symbol)
        sums = [self._value(add.tree, add) for add in moves.adds]
        for add, symbol in zip(moves.adds, sums, strict=True):
            self._hold(add.worker, add.part, add.root, symbol)

    def _check(self, moves: Round) -> None:
        """Everyone and everything named exists, and no two sends or additions write the same place."""
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

    def _read(self, send: Send) -> Symbol:
        held = self._held(send.source, send.part, send.root)
        if held is None:
            self._refuse(send.source, send.part, f"sends {_name(send.root)} to worker {send.target} without having it")
        return held

    def _held(self, worker: int, part: int, root: Root | None) -> Symbol | None:
        return self.running[worker][part] if root is None else self.roots[worker].get((root, part))

    def _arrive(self, send: Send, symbol: Symbol) -> None:
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

    def _value(self, tree: Tree, add: Add) -> Symbol:
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
        raise Wrong(f"round {self._round}", worker, part, problem)


def _name(root: Root | None) -> str:
    return "the running value" if root is None else f"root {root.index} of worker {root.rank}"
