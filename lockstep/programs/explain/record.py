"""A story as JSON."""

from typing import Any

from lockstep.lanes import Branch, Root, Tree
from lockstep.programs.explain.story import EXAMPLE_BYTES, Scene, Story
from lockstep.wire.schedules import Add, Send


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
        "cost": story.algorithm.cost,
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


def _send(send: Send) -> dict[str, Any]:
    move = {"source": send.source, "target": send.target, "part": send.part, "adds": send.adds}
    return move | {"root": None if send.root is None else _tree(send.root)}


def _add(add: Add) -> dict[str, Any]:
    move = {"worker": add.worker, "part": add.part, "tree": _tree(add.tree)}
    return move | {"root": None if add.root is None else _tree(add.root)}


def _tree(tree: Tree) -> str:
    """Root i of worker w is written w.i."""
    if isinstance(tree, Branch):
        return f"({_tree(tree.left)}+{_tree(tree.right)})"
    return f"{tree.rank}.{tree.index}" if isinstance(tree, Root) else str(tree)
