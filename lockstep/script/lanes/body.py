"""What the body of a loop over `run.steps` may not do, as far as its source shows it. Pure.

# Note [Bodies run once for each lane]
# The body of `for x, y in run.steps(loader)` was written for a whole batch, and runs once for each lane that this
# worker carries, and again where a step is redone. What it computes from the lane is right. What it counts, adds up or
# hands on to the next lane by itself (`count += 1`) would depend on the workers: that is refused where the source shows
# it. A name that the body sets before it changes it is the lane's own (`loss = a` and then `loss += b`).
"""

import ast

from lockstep.script.source.lane_loops import loops_headed
from lockstep.script.source.syntax import called, names_read, names_set, own_statements

IN_LANES = "Write `for batch in loader: for x, y in run.lanes(batch): ...` instead, with it after the inner loop."


def refused_in_body(path: str, line: int) -> str | None:
    """Why the loop whose head is at this line cannot be one over `run.steps`; None if nothing shows."""
    loops = [loop for loop in loops_headed(path, line) if "steps" in called(loop.iter)]
    if not loops:
        return None
    loop = loops[-1]
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
    own = names_set(loop.target)
    for node in own_statements(loop.body):  # a statement comes before the names in it
        if isinstance(node, ast.AugAssign) and not (isinstance(node.target, ast.Name) and node.target.id in own):
            return node
        if isinstance(node, ast.Assign) and (names_set(*node.targets) & names_read(node.value)) - own:
            return node
        own |= names_set(node) if isinstance(node, ast.Name) else set()
    return None
