"""What a script's source says about its counters: which a loop begins anew, and on which the training depends.

Pure: source text goes in. What cannot be read, or parsed, says nothing.

# Note [What depends on a counter]
# Many scripts count batches only to print now and then. So before a script is refused because of a counter, its source
# is asked whether the training depends on it: whether a test that mentions the counter, or a name that was computed
# from it or that such a test decides on, guards a call that trains (`optimizer.step()`, `run.lanes(...)`, and the like)
# or ends the loop, or whether the number goes into a loss, a rate, a scheduler, or a loop's range.
"""

import ast
import linecache
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

TRAINS = frozenset(
    {"step", "zero_grad", "backward", "lanes", "unscale_", "clip_grad_norm_", "clip_grad_value_", "update"}
)
"""Methods whose call changes what is trained."""

_BARS = ("bar", "tqdm", "prog")
_OPTIMIZER = re.compile(r"optim|sched|(^|_)opt(_|\d|$)")
_RATES = frozenset({"lr", "weight_decay", "momentum", "betas", "alpha", "eps"})
_LOOPS = (ast.For, ast.While)
_TESTED = (ast.If, ast.While, ast.IfExp)
_ASSIGNS = (ast.Assign, ast.AnnAssign, ast.AugAssign)


@dataclass(frozen=True)
class Dependence:
    """A line of the script at which the training depends on a counter, and how, in words."""

    name: str
    line: int
    how: str


@dataclass(frozen=True)
class Function:
    """The source of the function that a line is in; of a module, what is outside of functions too."""

    path: str
    node: ast.AST

    def dependence(self, name: str, *, again: bool = False, in_calls: bool = True) -> Dependence | None:
        """Where the training depends on `name` first, if it does; with `again`, only in what is done more than once.

        To be given to a function beside an optimizer counts `in_calls`.
        """
        nodes = [node for part in (_repeated(self.node) if again else [self.node]) for node in ast.walk(part)]
        tainted = _computed_from(nodes, name)
        found = [self._dependence(node, tainted, name, in_calls) for node in nodes]
        lines = [dependence for dependence in found if dependence is not None]
        return min(lines, key=lambda dependence: dependence.line, default=None)

    def _dependence(self, node: ast.AST, tainted: set[str], name: str, in_calls: bool) -> Dependence | None:
        if isinstance(node, _TESTED) and _mentions(node.test, tainted):
            call = _first_training_call(node) or self._skipped_call(node)
            if call is not None:
                return Dependence(name, node.lineno, f"decides whether {call} is called")
            if isinstance(node, ast.While) or _has(node, ast.Break, ast.Return):
                return Dependence(name, node.lineno, "decides when the loop ends")
        return _goes_into(node, tainted, name, in_calls)

    def _skipped_call(self, node: ast.AST) -> str | None:
        """A call that trains, behind a `continue`, in the same loop."""
        if not _has(node, ast.Continue):
            return None
        loops = [loop for loop in ast.walk(self.node) if isinstance(loop, _LOOPS) and node in ast.walk(loop)]
        end = getattr(node, "end_lineno", 0)
        behind = (
            [call for call in ast.walk(loops[-1]) if isinstance(call, ast.Call) and call.lineno > end] if loops else []
        )
        return next((f"{ast.unparse(call.func)}()" for call in behind if _trains(call)), None)

    def begins_anew(self, name: str) -> bool:
        """Whether a loop gives the name its first value again: as its own variable, or inside of it."""
        loops = (node for node in ast.walk(self.node) if isinstance(node, _LOOPS))
        return self.is_loop_variable(name) or any(
            _sets_constant(node, name) for loop in loops for node in ast.walk(loop)
        )

    def is_carried(self, name: str) -> bool:
        """Whether a turn of a loop may read what an earlier one left in the name: no loop that sets it does so first.

        What no loop sets by its name, but has changed, was changed inside: it is carried too.
        """
        loops = [loop for loop in ast.walk(self.node) if isinstance(loop, _LOOPS) and _sets(loop, name)]
        return not loops or any(_reads_before_it_sets(loop, name) for loop in loops)

    def is_loop_variable(self, name: str) -> bool:
        """Whether a `for` sets the name."""
        return any(isinstance(node, ast.For) and _is_named(node.target, name) for node in ast.walk(self.node))


def function_at(path: str, name: str) -> Function | None:
    """The function, or class, `name` of a file; the whole file for `<module>`."""
    tree = _parsed(path)
    if tree is None or name == "<module>":
        return None if tree is None else Function(path, tree)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name]
    return Function(path, found[-1]) if found else None


@lru_cache(maxsize=32)
def _parsed(path: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(path)), path)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _repeated(root: ast.AST) -> list[ast.AST]:
    """What is done more than once: loops, and functions without any, but for those that make an object."""
    if isinstance(root, ast.ClassDef):
        return [part for method in root.body for part in _repeated(method) if getattr(method, "name", "") != "__init__"]
    loops: list[ast.AST] = [node for node in ast.walk(root) if isinstance(node, _LOOPS)]
    return loops or ([] if isinstance(root, ast.Module) else [root])


def _computed_from(nodes: Iterable[ast.AST], name: str) -> set[str]:
    """The name, and all names that are assigned something in which one of them is mentioned, or where a test that
    mentions one of them decides."""
    tainted = {name}
    while True:
        new = {target for node in nodes for target in _assigned_by(node, tainted)}
        if new <= tainted:
            return tainted
        tainted |= new


def _assigned_by(node: ast.AST, tainted: set[str]) -> list[str]:
    if isinstance(node, _ASSIGNS):
        return _targets(node) if node.value is not None and _mentions(node.value, tainted) else []
    if isinstance(node, _TESTED) and _mentions(node.test, tainted):
        return [target for inner in ast.walk(node) if isinstance(inner, _ASSIGNS) for target in _targets(inner)]
    return []


def _sets(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.For) and _is_named(node.target, name):
        return True
    return any(isinstance(inner, _ASSIGNS) and name in _targets(inner) for inner in ast.walk(node))


def _reads_before_it_sets(loop: ast.For | ast.While, name: str) -> bool:
    """Statements are looked at in their order, up to the first that sets the name in any case."""
    return not (isinstance(loop, ast.For) and _is_named(loop.target, name)) and _is_read_first(loop.body, name) is True


def _is_read_first(statements: Iterable[ast.stmt], name: str) -> bool | None:
    """Whether the name is read before it is set; None if it is neither. A loop counts as if it were gone through."""
    for statement in statements:
        found: bool | None
        if isinstance(statement, ast.Assign | ast.AnnAssign) and name in _targets(statement):
            found = statement.value is not None and _mentions(statement.value, {name})
        elif isinstance(statement, ast.For | ast.While | ast.With):
            found = _is_read_first_inside(statement, name)
        else:
            found = _mentions(statement, {name}) or None
        if found is not None:
            return found
    return None


def _is_read_first_inside(block: ast.For | ast.While | ast.With, name: str) -> bool | None:
    head: list[ast.AST] = [block.test] if isinstance(block, ast.While) else []
    head += [block.iter] if isinstance(block, ast.For) else []
    head += [item.context_expr for item in block.items] if isinstance(block, ast.With) else []
    if any(_mentions(part, {name}) for part in head):
        return True
    if isinstance(block, ast.For) and _is_named(block.target, name):
        return False
    return _is_read_first(block.body, name)


def _goes_into(node: ast.AST, tainted: set[str], name: str, in_calls: bool) -> Dependence | None:
    if isinstance(node, ast.For) and _is_range(node.iter) and _is_named(node.target, name):
        return Dependence(name, node.lineno, "decides how long the loop goes on")
    takes = isinstance(node, ast.Call) and (_takes_rates(node) if in_calls else _trains(node))
    if isinstance(node, ast.Call) and takes and any(_mentions(part, tainted) for part in _arguments(node)):
        return Dependence(name, node.lineno, f"goes into {ast.unparse(node)}")
    if isinstance(node, ast.Call) and _is_backward(node) and _mentions(node.func, tainted):
        return Dependence(name, node.lineno, f"goes into {ast.unparse(node)}")
    if isinstance(node, ast.Assign) and _mentions(node.value, tainted) and any(map(_is_rate, node.targets)):
        return Dependence(name, node.lineno, f"goes into {ast.unparse(node.targets[0])}")
    return None


def _first_training_call(node: ast.AST) -> str | None:
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and _trains(call)]
    return f"{ast.unparse(calls[0].func)}()" if calls else None


def _trains(call: ast.Call) -> bool:
    """A progress bar has an `update` too."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in TRAINS:
        return False
    owner = ast.unparse(call.func.value).lower()
    return not any(word in owner for word in _BARS)


def _is_backward(call: ast.Call) -> bool:
    """`loss.backward()`."""
    return isinstance(call.func, ast.Attribute) and call.func.attr == "backward"


def _takes_rates(call: ast.Call) -> bool:
    """`scheduler.step(...)`, or a function that is given an optimizer or a scheduler beside other things."""
    given = [name.lower() for part in _arguments(call) if (name := _written(part)) is not None]
    return _trains(call) or any(_OPTIMIZER.search(name) for name in given)


def _has(node: ast.AST, *kinds: type[ast.AST]) -> bool:
    return any(isinstance(inner, kinds) for inner in ast.walk(node))


def _is_range(node: ast.AST) -> bool:
    """`range(...)`, also inside of a progress bar."""
    return any(isinstance(call, ast.Call) and _is_named(call.func, "range") for call in ast.walk(node))


def _is_rate(target: ast.AST) -> bool:
    """`group["lr"]`, `self.lr`: something that an optimizer reads."""
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return target.slice.value in _RATES
    return isinstance(target, ast.Attribute) and target.attr in _RATES


def _arguments(call: ast.Call) -> Iterator[ast.AST]:
    yield from call.args
    yield from (keyword.value for keyword in call.keywords)


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(_written(inner) in names for inner in ast.walk(node))


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [name for target in targets for inner in ast.walk(target) if (name := _written(inner)) is not None]


def _is_named(node: ast.AST, name: str) -> bool:
    return any(_written(inner) == name for inner in ast.walk(node))


def _written(node: ast.AST) -> str | None:
    """A variable, or an attribute of `self`, as counters are named."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return None


def _sets_constant(node: ast.AST, name: str) -> bool:
    is_constant = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    return is_constant and any(_is_named(target, name) for target in node.targets)  # type: ignore[attr-defined]
