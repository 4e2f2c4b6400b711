"""Statements that go on from what their own last run has left: `n += 1`, `h = f(h)`, `seen.append(x)`. Pure.

What a function sets first and then changes is its own, and does not go on from an earlier call.
"""

import ast
from collections.abc import Iterator, Mapping, Set
from functools import lru_cache

from lockstep.script.body import names_in, own_statements
from lockstep.script.dependence import LOOPS, called, own_names, parsed, walked, written

_SEEDS = frozenset({"manual_seed", "seed", "set_state", "setstate"})
GROWS = frozenset({"append", "extend", "add"})
_LANES = frozenset({"lanes", "steps"})
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp
_YIELDS = ast.Yield | ast.YieldFrom
_RUN_THROUGH = frozenset({"sum", "max", "min", "list", "tuple", "set", "dict", "sorted", "all", "any", "fmean"})
_WRAPPERS = frozenset({"enumerate", "zip", "map", "filter", "iter", "islice", "tqdm", "chain"})
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NO_STEP = frozenset({"copy_", "zero_", "fill_", "detach_", "requires_grad_", "resize_", "set_"})
"""Methods of tensors whose result does not go on from the tensor's value."""


def attributes_that_go_on(path: str, *, over_passes: bool = False) -> Mapping[str, str]:
    """Attributes, of whatever object, from which the file's code goes on; each with the statement in words.

    With `over_passes`, those that no pass over a loader begins anew.
    """
    return _attributes_that_go_on(path, over_passes)


@lru_cache(maxsize=1024)
def _attributes_that_go_on(path: str, over_passes: bool) -> Mapping[str, str]:
    tree = parsed(path)
    found: dict[str, str] = {}
    for function in (*functions_of(tree), *([] if tree is None else [tree])):
        for statement, target in _statements(function.body):
            if isinstance(target, ast.Attribute) and not _is_set_before(function, statement, target, over_passes):
                found.setdefault(target.attr, in_words(statement))
    return found


@lru_cache(maxsize=1024)
def outer_names_that_go_on(path: str) -> Mapping[str, str]:
    """The same for variables that stand outside of the function: global ones, and those of a function around it."""
    tree = parsed(path)
    found: dict[str, str] = {}
    for function in functions_of(tree):
        outer, own = declared_outside(function), own_names(function)
        for statement, target in _statements(function.body):
            if isinstance(target, ast.Name) and (target.id in outer or target.id not in own):
                found.setdefault(target.id, in_words(statement))
    return found


@lru_cache(maxsize=1024)
def seeded_in_lanes(path: str) -> Set[str]:
    """Names and attributes of generators that the file sets in each lane: in a loop over lanes, or in a function
    without such a loop that draws from them too."""
    tree = parsed(path)
    functions = [one for one in functions_of(tree) if not lane_loops(one)]
    loops = [] if tree is None else lane_loops(tree)
    set_in_loops = {name for loop in loops for name, _ in _seeded(loop)}
    return set_in_loops | {name for one in functions for name, uses in _seeded(one) if uses > 1}


def _seeded(part: ast.AST) -> Iterator[tuple[str, int]]:
    """The names that are set in it, and how often it mentions them."""
    names = [
        (written(node) or "").rpartition(".")[2] for node in walked(part) if isinstance(node, ast.Name | ast.Attribute)
    ]
    for node in walked(part):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SEEDS:
            name = (written(node.func.value) or "").rpartition(".")[2]
            yield name, names.count(name)


def gone_on_from(node: ast.AST) -> ast.expr | None:
    """What the statement goes on from: of `totals["right"] += 1` it is `totals`."""
    if isinstance(node, ast.AugAssign):
        return bare(node.target)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = bare(node.targets[0])
        is_read = isinstance(target, ast.Name | ast.Attribute) and _is_read(target, node.value)
        return target if is_read else None
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _changed_in_place(node.value)
    return None


def lane_loops(function: ast.AST) -> list[ast.For]:
    """The loops over `run.lanes` and `run.steps` in it."""
    return [node for node in walked(function) if isinstance(node, ast.For) and _LANES & called(node.iter)]


def loops_at(path: str, line: int) -> list[ast.For]:
    """Those over lanes that are asked for at this line of a file: its head is there, or it runs over what is set there.

    Of a line that calls what hands lanes on (`hands_on`), the loop over that.
    """
    tree = parsed(path)
    nodes = () if tree is None else walked(function_around(tree, line))
    loops = [node for node in nodes if isinstance(node, ast.For)]
    here = [loop for loop in loops if loop.lineno <= line <= (loop.iter.end_lineno or loop.lineno)]
    sets = [
        one for one in nodes if isinstance(one, ast.Assign) and one.lineno <= line <= (one.end_lineno or one.lineno)
    ]
    names = {name for one in sets if _LANES & called(one.value) for name in names_in(one.targets, ast.Store)}
    return here or [loop for loop in loops if loop.lineno > line and names & names_in([loop.iter], ast.Load)]


@lru_cache(maxsize=1024)
def hands_on(path: str, line: int) -> bool:
    """Whether the function around this line hands the lanes that it asks for there on, by return or yield.

    Asked at every loop over lanes.
    """
    tree = parsed(path)
    statement = None if tree is None else statement_at(function_around(tree, line), line)
    if isinstance(statement, ast.Return) and statement.value is not None:
        return not computed_of_all(statement.value)
    return statement is not None and any(isinstance(one, _YIELDS) for one in own_statements([statement]))


def computed_of_all(node: ast.AST) -> ast.expr | None:
    """What an expression computes of all lanes, if anything: `[f(x) for x in run.lanes(batch)]`, or a `sum` of it."""
    over = [one for one in ast.walk(node) if isinstance(one, ast.Call | _COMPREHENSIONS) and _LANES & called(one)]
    return next((one for one in over if not isinstance(one, ast.Call) or _runs_through(one)), None)


def _runs_through(call: ast.Call) -> bool:
    """Whether it goes through the lanes that it is given: those that are known, and all that take what is computed."""
    name = ast.unparse(call.func).rpartition(".")[2]
    is_given = any(isinstance(one, ast.GeneratorExp) and _LANES & called(one) for one in call.args)
    return name in _RUN_THROUGH or (is_given and name not in _WRAPPERS)


def statement_at(function: ast.AST, line: int) -> ast.stmt | None:
    """The innermost statement that has the line; of a compound one, in its head."""
    found = None
    for node in walked(function):
        if isinstance(node, ast.stmt) and node.lineno <= line:
            body = getattr(node, "body", None)
            if line <= (max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno):
                found = node
    return found


def function_around(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function around a line; the module where there is none."""
    functions = [node for node in walked(tree) if isinstance(node, FUNCTIONS)]
    around = [node for node in functions if node.lineno <= line <= (node.end_lineno or node.lineno)]
    return max(around, key=lambda node: node.lineno) if around else tree


def bare(node: ast.expr) -> ast.expr:
    """Of `totals["right"]` what stands in front."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def in_words(statement: ast.stmt) -> str:
    return f"`{ast.unparse(statement):.100}` (line {statement.lineno})"


def _changed_in_place(call: ast.Call) -> ast.expr | None:
    """What a call of methods like `append` and `mul_` changes: of `self.mean.mul_(0.9).add_(x)` it is `self.mean`."""
    methods: list[str] = []
    owner: ast.expr = call
    while isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute):
        methods.append(owner.func.attr)
        owner = owner.func.value
    steps = [one for one in methods if one.endswith("_") and not one.endswith("__") and one not in _NO_STEP]
    is_changed = bool(steps) or (bool(call.args) and methods[:1] != [] and methods[0] in GROWS)
    return bare(owner) if is_changed and isinstance(bare(owner), ast.Name | ast.Attribute) else None


def _is_read(target: ast.Name | ast.Attribute, value: ast.expr) -> bool:
    written = ast.unparse(target)
    same = [node for node in ast.walk(value) if isinstance(node, type(target))]
    return any(isinstance(node.ctx, ast.Load) and ast.unparse(node) == written for node in same)


def functions_of(tree: ast.Module | None) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes = () if tree is None else walked(tree)
    return (node for node in nodes if isinstance(node, FUNCTIONS) and node.name != "__init__")


def _statements(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.expr]]:
    for node in own_statements(body):
        target = gone_on_from(node)
        if target is not None:
            assert isinstance(node, ast.stmt)
            yield node, target


def _is_set_before(function: ast.AST, statement: ast.stmt, target: ast.Attribute, over_passes: bool) -> bool:
    """In a loop over lanes, or over batches, it would have to be in its body; `over_passes`, around those."""
    written = ast.unparse(target)
    loops = [node for node in walked(function) if isinstance(node, LOOPS) and lane_loops(node)]
    around = [loop for loop in reversed(loops) if statement in walked(loop)]
    if over_passes:
        around = [loop for loop in around if not _is_over_lanes(loop)][1:]
    within = around[0] if around else function
    return any(
        isinstance(node, ast.Assign)
        and node.lineno < statement.lineno
        and any(ast.unparse(one) == written for one in node.targets)
        and not _is_read(target, node.value)
        for node in walked(within)
    )


def _is_over_lanes(loop: ast.For | ast.While) -> bool:
    return isinstance(loop, ast.For) and "lanes" in called(loop.iter)


def declared_outside(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    nodes = own_statements(function.body)
    return {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
