"""A schedule told round by round: who sends what to whom, and how much of every part each worker then holds."""

from dataclasses import dataclass
from itertools import groupby

from lockstep.programs.explain.question import Question
from lockstep.wire.schedules import Hosts, Round, Schedule
from lockstep.wire.schedules.catalogue import Algorithm
from lockstep.wire.schedules.proof import Proof, prove
from lockstep.wire.schedules.rehearsal import Rehearsal

EXAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class Message:
    """All that one worker sends to another in a round."""

    source: int
    target: int
    parts: tuple[int, ...]
    adds: bool
    num_roots: int

    @property
    def is_summand(self) -> bool:
        """Whether it will be added, not just copied."""
        return self.adds or self.num_roots > 0


@dataclass(frozen=True)
class Scene:
    """One round, and how many contributions each worker then holds: `held[worker][part]`."""

    moves: Round
    messages: tuple[Message, ...]
    held: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Story:
    """A schedule that was proved right, and its rounds. `whole` is the number of contributions in a result."""

    name: str
    algorithm: Algorithm
    schedule: Schedule
    proof: Proof
    whole: int
    at_first: tuple[tuple[int, ...], ...]
    scenes: tuple[Scene, ...]
    brackets: str | None
    hosts: Hosts | None


def tell(question: Question) -> Story:
    """Proves the schedule that the question asks for, and plays it."""
    algorithm, setting = question.settle()
    schedule = algorithm.schedule(setting)
    proof = prove(schedule)
    rehearsal = Rehearsal(schedule)
    at_first = _held(rehearsal)
    scenes = tuple(_scene(rehearsal, moves) for moves in schedule.rounds)
    return Story(
        name=question.name,
        algorithm=algorithm,
        schedule=schedule,
        proof=proof,
        whole=_whole(schedule),
        at_first=at_first,
        scenes=scenes,
        brackets=str(rehearsal.running[0][0]) if "reduce" in schedule.collective else None,
        hosts=setting.hosts if "hosts" in algorithm.parameters else None,
    )


def spans(parts: tuple[int, ...]) -> str:
    """Part numbers for people: 0–3, 5."""
    runs = [[part for _, part in run] for _, run in groupby(enumerate(parts), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _scene(rehearsal: Rehearsal, moves: Round) -> Scene:
    rehearsal.play(moves)
    return Scene(moves, _messages(moves), _held(rehearsal))


def _messages(moves: Round) -> tuple[Message, ...]:
    between: dict[tuple[int, int], list[tuple[int, bool, bool]]] = {}
    for send in moves.sends:
        between.setdefault((send.source, send.target), []).append((send.part, send.adds, send.root is not None))
    return tuple(
        Message(
            source,
            target,
            parts=(parts := tuple(sorted({part for part, _, _ in sent}))),
            adds=any(adds for _, adds, _ in sent),
            num_roots=sum(is_root for _, _, is_root in sent) // len(parts),
        )
        for (source, target), sent in sorted(between.items())
    )


def _held(rehearsal: Rehearsal) -> tuple[tuple[int, ...], ...]:
    """How many contributions each worker holds of each part: in its running value or, without one, in its roots."""
    roots: list[dict[int, int]] = [{} for _ in rehearsal.roots]
    for known, held in zip(roots, rehearsal.roots, strict=True):
        for (_, part), symbol in held.items():
            known[part] = known.get(part, 0) | symbol.members
    return tuple(
        tuple((value.members if value else known.get(part, 0)).bit_count() for part, value in enumerate(running))
        for running, known in zip(rehearsal.running, roots, strict=True)
    )


def _whole(schedule: Schedule) -> int:
    if schedule.reduction is not None:
        return sum(len(fold.lanes) for fold in schedule.reduction.folds)
    return schedule.num_workers if "reduce" in schedule.collective else 1
