"""What the source of a plain training script shows: pure, from text."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_LOADER = "DataLoader"
_CLIPPERS = ("clip_grad_norm_", "clip_grad_value_")
_READERS = ("next", "list", "iter", "tuple", "enumerate")
"""Functions that are given parameters and make no optimizer."""


@dataclass(frozen=True)
class Obstacle:
    """Why something cannot be seen, or done, and what to write by hand."""

    line: int
    why: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.why}" if self.line else self.why


@dataclass(frozen=True)
class TrainingScript:
    """The statements of a script that lockstep has to do with."""

    tree: ast.Module
    loop: ast.For
    """Over the batches: its body has the backward pass and the optimizer's step."""
    scope: ast.AST
    """The innermost function that has the loop; the module where none has."""
    loader: ast.Assign
    """`loader = DataLoader(...)`, for that loop."""
    optimizer: ast.Assign
    scheduler: ast.Assign | None
    model: str
    epochs: ast.For | None
    """The loop `for epoch in range(N)` around the training loop, if it is one."""


class CannotSee(Exception):  # noqa: N818
    """Raised with what stands against a conversion."""

    def __init__(self, *obstacles: Obstacle) -> None:
        super().__init__("; ".join(map(str, obstacles)))
        self.obstacles = obstacles


def understand(text: str) -> TrainingScript:
    """The parts of the script; raises CannotSee where they do not show, or cannot be as they are."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise CannotSee(Obstacle(error.lineno or 0, f"Python cannot read it: {error.msg}")) from error
    if any(name == "lockstep" for name in _imported(tree)):
        raise CannotSee(Obstacle(0, "the script imports lockstep already"))
    loop = _training_loop(tree)
    optimizer = _optimizer(tree, loop)
    obstacles = list(_obstacles_in(loop, assigned_name(optimizer)))
    if obstacles:
        raise CannotSee(*obstacles)
    loader, scheduler = _loader(tree, loop), _scheduler(tree, optimizer)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and has(node, loop)]
    scope = functions[-1] if functions else tree
    return TrainingScript(tree, loop, scope, loader, optimizer, scheduler, _model_of(optimizer), _epochs(tree, loop))


def called_name(node: ast.AST) -> str:
    """`a.b.c(...)` is a call of `c`; "" for what is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def assigned_name(statement: ast.Assign) -> str:
    target = statement.targets[0]
    return target.id if isinstance(target, ast.Name) else ""


def _training_loop(tree: ast.Module) -> ast.For:
    """The innermost loop with a backward pass in it."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and _calls(node, "backward")]
    inner = [loop for loop in loops if not any(other is not loop and other in ast.walk(loop) for other in loops)]
    if not inner:
        raise CannotSee(Obstacle(0, "no `for` loop has a call of backward() in it: there is no training loop to see"))
    if len(inner) > 1:
        lines = ", ".join(str(loop.lineno) for loop in inner)
        raise CannotSee(
            Obstacle(inner[1].lineno, f"backward() is in several loops (lines {lines}): change each by hand")
        )
    return inner[0]


def _obstacles_in(loop: ast.For, optimizer: str) -> Iterator[Obstacle]:
    """What keeps the body from standing under run.steps as it is."""
    by_hand = "write `for batch in loader: for x, y in run.lanes(batch): ...`, and it after the inner loop"
    for node in ast.walk(ast.Module(loop.body, [])):
        if isinstance(node, ast.AugAssign):
            yield Obstacle(node.lineno, f"`{ast.unparse(node)}` would add up the lanes of one worker: {by_hand}")
        elif isinstance(node, ast.Break):
            yield Obstacle(node.lineno, f"`break` would leave a batch before its last lane: {by_hand}")
        elif isinstance(node, ast.Call) and called_name(node) in _CLIPPERS:
            yield Obstacle(node.lineno, f"{called_name(node)} needs the gradient of the whole batch: {by_hand}")
        elif isinstance(node, ast.Call) and called_name(node) == "step" and _owner(node) != optimizer:
            once = f"`{ast.unparse(node)}` happens once for each batch, as {optimizer}.step()"
            yield Obstacle(node.lineno, f"{once}: {by_hand}")


def _optimizer(tree: ast.Module, loop: ast.For) -> ast.Assign:
    """The one whose step() is called in the loop, where it is made from a model's parameters."""
    made = [node for node in _assignments(tree) if _model_of(node)]
    stepped = {_owner(node) for node in _calls(loop, "step")}
    mine = [node for node in made if assigned_name(node) in stepped]
    if not made:
        why = (
            "no `optimizer = ...(model.parameters(), ...)` is there: call run.replicate(model, optimizer) by hand, or "
            "run.replicate(model) where the script updates parameters without one"
        )
        raise CannotSee(Obstacle(0, why))
    if not mine:
        raise CannotSee(Obstacle(loop.lineno, f"the loop never calls {assigned_name(made[0])}.step()"))
    if len({assigned_name(node) for node in mine}) > 1:
        why = "the loop has several optimizers (a GAN?): write run.steps(loader, [optimizers in their order])"
        raise CannotSee(Obstacle(mine[1].lineno, why))
    if len(mine) > 1:
        why = f"{assigned_name(mine[0])} is made in several places: call run.replicate after them by hand"
        raise CannotSee(Obstacle(mine[1].lineno, why))
    return mine[0]


def _model_of(statement: ast.Assign) -> str:
    """`model`, for `optimizer = SGD(model.parameters(), ...)`; "" if it is no such thing."""
    arguments = statement.value.args if isinstance(statement.value, ast.Call) else []
    first = arguments[0] if arguments and called_name(statement.value) not in _READERS else None
    return _owner(first) if first is not None and called_name(first) == "parameters" else ""


def _scheduler(tree: ast.Module, optimizer: ast.Assign) -> ast.Assign | None:
    """What is made with the optimizer as its first argument, after it."""
    for node in _assignments(tree):
        if isinstance(node.value, ast.Call) and node.value.args and node.lineno > optimizer.lineno:
            first = node.value.args[0]
            if isinstance(first, ast.Name) and first.id == assigned_name(optimizer) and assigned_name(node):
                return node
    return None


def _loader(tree: ast.Module, loop: ast.For) -> ast.Assign:
    """The DataLoader that the loop reads; where the loop is in a function, the one that is passed by that name.

    `enumerate` may stand around it: run.steps counts batches then.
    """
    read = loop.iter
    if isinstance(read, ast.Call) and called_name(read) == "enumerate" and read.args:
        read = read.args[0]
    if not isinstance(read, ast.Name):
        raise CannotSee(Obstacle(loop.lineno, f"the loop reads `{ast.unparse(read)}`, not a loader by its name"))
    name = read.id
    loaders = [node for node in _assignments(tree) if called_name(node.value) == _LOADER]
    named = [node for node in loaders if assigned_name(node) == name]
    if len(named) != 1:
        why = f"no single `{name} = DataLoader(...)` is there: write {name} = run.shard({name}) by hand"
        raise CannotSee(Obstacle(loop.lineno, why))
    return named[0]


def _epochs(tree: ast.Module, loop: ast.For) -> ast.For | None:
    """`for epoch in range(N)` around the training loop, or around the call of the function that has it."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and has(node, loop)}
    others = [node for node in ast.walk(tree) if isinstance(node, ast.For) and node is not loop]
    around = [node for node in others if has(node, loop) or any(_calls(node, name) for name in names)]
    counted = [node for node in around if _is_short_range(node.iter)]
    return counted[-1] if counted else None


def has(node: ast.AST, inner: ast.AST) -> bool:
    return any(one is inner for one in ast.walk(node))


def _is_short_range(call: ast.expr) -> bool:
    """One argument, on one line: `range(N)` counts as run.epochs does."""
    is_range = isinstance(call, ast.Call) and called_name(call) == "range" and len(call.args) == 1
    return is_range and call.lineno == call.end_lineno


def _calls(node: ast.AST, name: str) -> list[ast.Call]:
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Call) and called_name(inner) == name]


def _owner(node: ast.AST) -> str:
    """`optimizer`, for `optimizer.step()`."""
    function = getattr(node, "func", None)
    value = function.value if isinstance(function, ast.Attribute) else None
    return value.id if isinstance(value, ast.Name) else ""


def _assignments(tree: ast.Module) -> list[ast.Assign]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and len(node.targets) == 1]
    return sorted(found, key=lambda node: node.lineno)


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
