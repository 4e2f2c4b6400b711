"""A schedule round by round, also as JSON: what each worker sends to which, and what every worker then holds."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lockstep.lanes import Branch, Root, Tree
from lockstep.programs.explain.proof import Proof, SymbolicExecution, prove
from lockstep.programs.explain.request import ExplainRequest
from lockstep.programs.explain.schedules.catalogue import Algorithm
from lockstep.wire.schedules import AddPart, Schedule, ScheduleRound, SendPart
from lockstep.wire.transport import Hosts

EXAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class RoundMessage:
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

    moves: ScheduleRound
    messages: tuple[RoundMessage, ...]
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


def make_story(request: ExplainRequest) -> Story:
    """Proves the schedule of the request; returns its story."""
    algorithm, setting = request.resolve()
    schedule = algorithm.schedule(setting)
    proof = prove(schedule)
    execution = SymbolicExecution(schedule)
    at_first = _held(execution)
    scenes = tuple(_scene(execution, moves) for moves in schedule.rounds)
    return Story(
        name=request.name,
        algorithm=algorithm,
        schedule=schedule,
        proof=proof,
        whole=_whole(schedule),
        at_first=at_first,
        scenes=scenes,
        brackets=str(execution.running[0][0]) if "reduce" in schedule.collective else None,
        hosts=setting.hosts if "hosts" in algorithm.parameters else None,
    )


def spans(parts: tuple[int, ...]) -> str:
    """Part numbers for people: 0–3, 5."""
    runs = [[part for _, part in run] for _, run in groupby(enumerate(parts), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _scene(execution: SymbolicExecution, moves: ScheduleRound) -> Scene:
    execution.play(moves)
    return Scene(moves, _messages(moves), _held(execution))


def _messages(moves: ScheduleRound) -> tuple[RoundMessage, ...]:
    between: dict[tuple[int, int], list[tuple[int, bool, bool]]] = {}
    for send in moves.sends:
        between.setdefault((send.source, send.target), []).append((send.part, send.adds, send.root is not None))
    return tuple(
        RoundMessage(
            source,
            target,
            parts=(parts := tuple(sorted({part for part, _, _ in sent}))),
            adds=any(adds for _, adds, _ in sent),
            num_roots=sum(is_root for _, _, is_root in sent) // len(parts),
        )
        for (source, target), sent in sorted(between.items())
    )


def _held(execution: SymbolicExecution) -> tuple[tuple[int, ...], ...]:
    """How many contributions each worker holds of each part: in its running value or, without one, in its roots."""
    roots: list[dict[int, int]] = [{} for _ in execution.roots]
    for known, held in zip(roots, execution.roots, strict=True):
        for (_, part), symbol in held.items():
            known[part] = known.get(part, 0) | symbol.members
    return tuple(
        tuple((value.members if value else known.get(part, 0)).bit_count() for part, value in enumerate(running))
        for running, known in zip(execution.running, roots, strict=True)
    )


def _whole(schedule: Schedule) -> int:
    if schedule.reduction is not None:
        return sum(len(fold.lanes) for fold in schedule.reduction.folds)
    return schedule.num_workers if "reduce" in schedule.collective else 1


# -- as JSON -------------------------------------------------------------------------------------------------


def as_json(story: Story) -> dict[str, Any]:
    """Everything that the terminal shows, with every single move."""
    return {
        "collective": story.schedule.collective,
        "algorithm": story.name,
        "summary": story.algorithm.summary,
        "workers": story.schedule.num_workers,
        "parts": story.schedule.num_parts,
        "exact": story.algorithm.exact,
        "brackets": story.brackets,
        "contributions": story.whole,
        "cost": str(story.algorithm.cost),
        "num_rounds": story.proof.rounds,
        "parts_sent_by": list(story.proof.parts_sent_by),
        "most_bytes_sent": story.proof.most_bytes_sent(EXAMPLE_BYTES),
        "of_bytes": EXAMPLE_BYTES,
        "held_at_first": story.at_first,
        "rounds": [_round(scene) for scene in story.scenes],
    }


def _round(scene: Scene) -> dict[str, Any]:
    return {
        "sends": [_send(send) for send in scene.moves.sends],
        "adds": [_add(add) for add in scene.moves.adds],
        "held": scene.held,
    }


def _send(send: SendPart) -> dict[str, Any]:
    move = {"source": send.source, "target": send.target, "part": send.part, "adds": send.adds}
    return move | {"root": None if send.root is None else _tree(send.root)}


def _add(add: AddPart) -> dict[str, Any]:
    move = {"worker": add.worker, "part": add.part, "tree": _tree(add.tree)}
    return move | {"root": None if add.root is None else _tree(add.root)}


def _tree(tree: Tree) -> str:
    """Root i of worker w is written w.i."""
    if isinstance(tree, Branch):
        return f"({_tree(tree.left)}+{_tree(tree.right)})"
    return f"{tree.rank}.{tree.index}" if isinstance(tree, Root) else str(tree)
