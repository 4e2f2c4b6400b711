"""A schedule round by round, also as JSON: what each worker sends to which, and what every worker then holds."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lockstep.lanes import Branch, Root, Tree
from lockstep.programs.explain.proof import Proof, SymbolicExecution, prove
from lockstep.programs.explain.request import resolve
from lockstep.programs.explain.schedules.catalogue import Algorithm
from lockstep.wire.schedules import Collective, Schedule, ScheduleRound
from lockstep.wire.transport import Hosts

EXAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class RoundMessage:
    """All that one worker sends to another in a round."""

    source: int
    target: int
    parts: tuple[int, ...]
    num_roots: int
    is_summand: bool
    """Whether it will be added, not just copied."""


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


def make_story(collective: Collective, **options: Any) -> Story:
    """Proves the schedule that is asked for, as `resolve` takes it; returns its story."""
    name, algorithm, setting = resolve(collective, **options)
    schedule = algorithm.schedule(setting)
    proof = prove(schedule)
    execution = SymbolicExecution(schedule)
    at_first = _held(execution)
    scenes = []
    for moves in schedule.rounds:
        execution.play(moves)
        scenes.append(Scene(moves, _messages(moves), _held(execution)))
    whole = schedule.num_workers if "reduce" in schedule.collective else 1
    if schedule.reduction is not None:
        whole = sum(len(fold.lanes) for fold in schedule.reduction.folds)
    return Story(
        name=name,
        algorithm=algorithm,
        schedule=schedule,
        proof=proof,
        whole=whole,
        at_first=at_first,
        scenes=tuple(scenes),
        brackets=str(execution.running[0][0]) if "reduce" in schedule.collective else None,
        hosts=setting.hosts if "hosts" in algorithm.parameters else None,
    )


def spans(parts: tuple[int, ...]) -> str:
    """Part numbers for people: 0–3, 5."""
    runs = [[part for _, part in run] for _, run in groupby(enumerate(parts), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _messages(moves: ScheduleRound) -> tuple[RoundMessage, ...]:
    between: dict[tuple[int, int], list[tuple[int, bool, bool]]] = {}
    for send in moves.sends:
        between.setdefault((send.source, send.target), []).append((send.part, send.adds, send.root is not None))
    return tuple(
        RoundMessage(
            source,
            target,
            parts=(parts := tuple(sorted({part for part, _, _ in sent}))),
            num_roots=sum(is_root for _, _, is_root in sent) // len(parts),
            is_summand=any(adds or is_root for _, adds, is_root in sent),
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
    sends = [
        {
            "source": send.source,
            "target": send.target,
            "part": send.part,
            "adds": send.adds,
            "root": _tree(send.root),
        }
        for send in scene.moves.sends
    ]
    adds = [
        {"worker": add.worker, "part": add.part, "tree": _tree(add.tree), "root": _tree(add.root)}
        for add in scene.moves.adds
    ]
    return {"sends": sends, "adds": adds, "held": scene.held}


def _tree(tree: Tree | None) -> str | None:
    """Root i of worker w is written w.i."""
    if tree is None:
        return None
    if isinstance(tree, Branch):
        return f"({_tree(tree.left)}+{_tree(tree.right)})"
    return f"{tree.rank}.{tree.index}" if isinstance(tree, Root) else str(tree)
