"""What the body of a loop over `run.steps` may not do, as far as its source shows it.

# Note [Bodies run once for each lane]
# The body of `for x, y in run.steps(loader)` was written for a whole batch, and runs once for each lane that this
# worker carries, and again where a step is redone. What it computes from the lane is right. What it counts, adds up or
# hands on to the next lane by itself would depend on the workers: that is refused where the source shows it. A name
# that the body sets before it changes it is the lane's own (`loss = a` and then `loss += b`).
"""

import ast
from collections.abc import Iterator, Sequence

from lockstep.script.dependence import parsed, walked

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)

IN_LANES = "Write `for batch in loader: for x, y in run.lanes(batch): ...` instead, with it after the inner loop."


def refused_in_body(path: str, line: int) -> str | None:
    """Why the loop whose head is at this line cannot be one over `run.steps`; None if nothing shows."""
    loop = _loop_at(path, line)
    if loop is None:
        return None
    if isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Name) and loop.iter.func.id == "enumerate":
        return (
            f"enumerate around run.steps (line {loop.lineno}) counts the lanes of this worker, not the batches: write "
            "run.steps(enumerate(loader)), or count by run.step"
        )
    node = _first_carried(loop)
    if node is None:
        return None
    what = "the sum" if isinstance(node, ast.AugAssign) else "what it goes on from"
    return (
        f"`{ast.unparse(node)}` (line {node.lineno}) is in the body of run.steps, which runs once for each lane of "
        f"this worker: {what} would depend on the workers. run.loss is the mean over the batch. {IN_LANES}"
    )


def _first_carried(loop: ast.For) -> ast.AugAssign | ast.Assign | None:
    """The first statement of the body that goes on from what the lane before has left."""
    own = names_in([loop.target], ast.Store)
    for node in own_statements(loop.body):  # a statement comes before the names in it
        if isinstance(node, ast.AugAssign) and not (isinstance(node.target, ast.Name) and node.target.id in own):
            return node
        if (
            isinstance(node, ast.Assign)
            and (names_in(node.targets, ast.Store) & names_in([node.value], ast.Load)) - own
        ):
            return node
        own |= names_in([node], ast.Store) if isinstance(node, ast.Name) else set()
    return None


def names_in(nodes: Sequence[ast.AST], how: type[ast.expr_context]) -> set[str]:
    """The names that are set, or read, in these."""
    within = [child for node in nodes for child in ast.walk(node)]
    return {child.id for child in within if isinstance(child, ast.Name) and isinstance(child.ctx, how)}


def _loop_at(path: str, line: int) -> ast.For | None:
    tree = parsed(path)
    loops = [node for node in walked(tree) if isinstance(node, ast.For)] if tree is not None else []
    here = [loop for loop in loops if loop.lineno <= line <= (loop.iter.end_lineno or loop.lineno) and _has_steps(loop)]
    return here[-1] if here else None


def _has_steps(loop: ast.For) -> bool:
    calls = [node.func for node in ast.walk(loop.iter) if isinstance(node, ast.Call)]
    return any(isinstance(called, ast.Attribute) and called.attr == "steps" for called in calls)


def own_statements(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """All that stands in these statements, except in functions and classes that they define."""
    for node in nodes:
        yield from _below(node)


def _below(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _SCOPES):
            yield from _below(child)
