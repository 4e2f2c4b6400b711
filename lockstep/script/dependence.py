"""Whether the training depends on a variable of the script, and which variables a loop resets, by the source.

Pure: source text in. Source that cannot be read, or parsed, shows nothing.

# Note [What depends on a counter]
# Many scripts count batches only to print now and then. So before a script is refused because of a counter, its source
# must show that the training depends on it: a test that mentions the counter, or a name that was computed from it or
# that such a test decides on, guards a call that trains (`optimizer.step()`, `run.lanes(...)`, and the like) or ends
# the loop, or the number goes into a loss, a rate, a scheduler, or a loop's range.
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
LOOPS = (ast.For, ast.While)
_TESTED = (ast.If, ast.While, ast.IfExp)
_ASSIGNS = (ast.Assign, ast.AnnAssign, ast.AugAssign)
_READ_IN_STEPS = ("Module", "Dataset")
"""Words in the names of classes whose objects compute, or read, what is trained on."""
_OF_LOADERS = frozenset({"collate_fn", "transform", "target_transform", "batch_sampler", "sampler", "worker_init_fn"})
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Dependence:
    """A line of the script at which the training depends on a variable, and how, in words."""

    line: int
    how: str


@dataclass(frozen=True)
class Function:
    """The source of a function, or class, of a file; of a module, what is outside of functions too."""

    node: ast.AST
    file: ast.Module | None = None

    def dependence(self, name: str, *, again: bool = False, in_calls: bool = True) -> Dependence | None:
        """Where the training depends on `name` first, if it does; with `again`, only in what is done more than once.

        With `in_calls`, being passed to a function beside an optimizer counts.
        """
        nodes = [node for part in (_repeated(self.node) if again else [self.node]) for node in walked(part)]
        readers = self._readers(name)
        given = {node.id for node in walked(self.node) for node in _given_to_loaders(node)}
        used = next((one for one in readers if isinstance(one, ast.ClassDef) or one.name in given), None)
        if used is not None:
            return Dependence(used.lineno, f"is read in {used.name}")
        tainted = computed_from(nodes, name).union(*(computed_from(nodes, reader.name) for reader in readers))
        places = (self._decides(node, tainted) or _goes_into(node, tainted, name, in_calls) for node in nodes)
        return min(filter(None, places), key=lambda dependence: dependence.line, default=None)

    def _readers(self, name: str) -> "list[ast.FunctionDef | ast.ClassDef]":
        """Functions, modules and data sets that read the variable where it stands: outside of them."""
        around = self.file if "." in name and self.file is not None else self.node
        found: dict[str, ast.FunctionDef | ast.ClassDef] = {}
        methods = {id(one) for node in walked(around) if isinstance(node, ast.ClassDef) for one in node.body}
        nodes = [node for node in walked(around) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        definitions = [node for node in nodes if node is not self.node and id(node) not in methods]
        while True:
            names = {name, *found}
            new = {one.name: one for one in definitions if _reads(one, names)}
            if new.keys() <= found.keys():
                return list(found.values())
            found |= new

    def _decides(self, node: ast.AST, tainted: set[str]) -> Dependence | None:
        if not isinstance(node, _TESTED) or not mentions(node.test, tainted):
            return None
        call = next(_training_calls(node), None) or self._skipped_call(node)
        if call is not None:
            return Dependence(node.lineno, f"decides whether {ast.unparse(call.func)}() is called")
        if isinstance(node, ast.While) or _has(node, ast.Break, ast.Return):
            return Dependence(node.lineno, "decides when the loop ends")
        return None

    def _skipped_call(self, node: ast.If | ast.While | ast.IfExp) -> ast.Call | None:
        """A call that trains, after a `continue`, in the same loop."""
        loops = [loop for loop in self._loops() if node in walked(loop)] if _has(node, ast.Continue) else []
        behind = (call for call in _training_calls(loops[-1]) if call.lineno > (node.end_lineno or 0)) if loops else ()
        return next(iter(behind), None)

    def _loops(self) -> list[ast.For | ast.While]:
        return [node for node in walked(self.node) if isinstance(node, LOOPS)]

    def is_reset(self, name: str) -> bool:
        """Whether a loop sets the name to its first value again: as its own variable, or inside of it."""
        inside = (node for loop in self._loops() for node in walked(loop))
        return self.is_loop_variable(name) or any(_sets_constant(node, name) for node in inside)

    def is_set_in_loop(self, name: str) -> bool:
        """Whether a loop sets the name itself, not only what it refers to."""
        return any(_sets(loop, name) for loop in self._loops())

    def is_loop_variable(self, name: str) -> bool:
        return any(is_target(loop, name) for loop in self._loops())


def function_at(path: str, name: str) -> Function | None:
    """The function, or class, `name` of a file; the whole file for `<module>`."""
    tree = parsed(path)
    if tree is None or name == "<module>":
        return None if tree is None else Function(tree, tree)
    definitions = [node for node in walked(tree) if isinstance(node, _DEFINES) and node.name == name]
    return Function(definitions[-1], tree) if definitions else None


@lru_cache(maxsize=32)
def parsed(path: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(path)), path)
    except (SyntaxError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=128)
def walked(node: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a file, a function or a loop, which are looked through many times: `ast.walk` takes 50 times as
    long as a look at each."""
    return tuple(ast.walk(node))


def _repeated(root: ast.AST) -> list[ast.AST]:
    """What is done more than once: loops, and functions without any, except those that make an object."""
    if isinstance(root, ast.ClassDef):
        return [part for method in root.body for part in _repeated(method) if getattr(method, "name", "") != "__init__"]
    loops: list[ast.AST] = [node for node in walked(root) if isinstance(node, LOOPS)]
    return loops or ([] if isinstance(root, ast.Module) else [root])


def computed_from(nodes: Iterable[ast.AST], name: str) -> set[str]:
    """The name, and all names that are assigned something in which one of them is mentioned, or where a test that
    mentions one of them decides."""
    tainted = {name}
    while True:
        new = {target for node in nodes for target in _assigned_by(node, tainted)}
        if new <= tainted:
            return tainted
        tainted |= new


def _given_to_loaders(node: ast.AST) -> Iterator[ast.Name]:
    """Functions that a call is given to read samples by, such as `collate_fn=pad`."""
    keywords = [one for one in node.keywords if one.arg in _OF_LOADERS] if isinstance(node, ast.Call) else []
    return (name for one in keywords for name in ast.walk(one.value) if isinstance(name, ast.Name))


def _reads(definition: ast.FunctionDef | ast.ClassDef, names: set[str]) -> bool:
    """Whether it reads one of the names, and does not set it: of a class, if it is that of a module or a data set."""
    if isinstance(definition, ast.ClassDef):
        is_read_in_steps = any(kind in ast.unparse(base) for base in definition.bases for kind in _READ_IN_STEPS)
        methods = [one for one in definition.body if isinstance(one, ast.FunctionDef) and one.name != "__init__"]
        return is_read_in_steps and any(_reads(method, names) for method in methods)
    own = own_names(definition)
    free = {name for name in names if name.split(".")[0] not in own}
    return any(mentions(statement, free) for statement in definition.body)


def own_names(function: ast.AST) -> set[str]:
    """The arguments of a function and what it sets, those of functions inside of it too."""
    nodes = walked(function)
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.arg for node in nodes if isinstance(node, ast.arg)}


def _assigned_by(node: ast.AST, tainted: set[str]) -> list[str]:
    if isinstance(node, _ASSIGNS):
        return _targets(node) if node.value is not None and mentions(node.value, tainted) else []
    if isinstance(node, _TESTED) and mentions(node.test, tainted):
        return [target for inner in ast.walk(node) if isinstance(inner, _ASSIGNS) for target in _targets(inner)]
    return []


def _sets(node: ast.AST, name: str) -> bool:
    assigns = (inner for inner in ast.walk(node) if isinstance(inner, _ASSIGNS))
    return is_target(node, name) or any(name in _targets(inner) for inner in assigns)


def _goes_into(node: ast.AST, tainted: set[str], name: str, in_calls: bool) -> Dependence | None:
    if is_target(node, name) and is_range(node):
        return Dependence(node.lineno, "decides how long the loop goes on")  # type: ignore[attr-defined]
    if isinstance(node, ast.Call):
        takes = _takes_rates(node) if in_calls else _trains(node)
        is_backward = isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
        given = takes and any(mentions(part, tainted) for part in _arguments(node))
        if given or (is_backward and mentions(node.func, tainted)):
            return Dependence(node.lineno, f"goes into {ast.unparse(node)}")
    if isinstance(node, ast.Assign) and mentions(node.value, tainted) and any(map(_is_rate, node.targets)):
        return Dependence(node.lineno, f"goes into {ast.unparse(node.targets[0])}")
    return None


def _training_calls(node: ast.AST) -> Iterator[ast.Call]:
    return (call for call in ast.walk(node) if isinstance(call, ast.Call) and _trains(call))


def _trains(call: ast.Call) -> bool:
    """A progress bar has an `update` too."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in TRAINS:
        return False
    owner = ast.unparse(call.func.value).lower()
    return not any(word in owner for word in _BARS)


def _takes_rates(call: ast.Call) -> bool:
    """`scheduler.step(...)`, or a function that gets an optimizer or a scheduler beside other things."""
    given = [name.lower() for part in _arguments(call) if (name := written(part)) is not None]
    return _trains(call) or any(_OPTIMIZER.search(name) for name in given)


def _has(node: ast.AST, *kinds: type[ast.AST]) -> bool:
    return any(isinstance(inner, kinds) for inner in ast.walk(node))


def is_target(node: ast.AST, name: str) -> bool:
    """Whether it is a `for` that sets the name."""
    return isinstance(node, ast.For) and mentions(node.target, {name})


def is_range(node: ast.AST) -> bool:
    """Whether it is a loop over `range(...)`, also inside of a progress bar."""
    parts = ast.walk(node.iter) if isinstance(node, ast.For) else iter(())
    return any(isinstance(call, ast.Call) and mentions(call.func, {"range"}) for call in parts)


def _is_rate(target: ast.AST) -> bool:
    """`group["lr"]`, `self.lr`: something that an optimizer reads."""
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return target.slice.value in _RATES
    return isinstance(target, ast.Attribute) and target.attr in _RATES


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def mentions(node: ast.AST, names: set[str]) -> bool:
    return any(written(inner) in names for inner in ast.walk(node))


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [name for target in targets for inner in ast.walk(target) if (name := written(inner)) is not None]


def called(node: ast.AST) -> set[str]:
    """The names of the methods that are called in it."""
    calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    return {method.attr for method in calls if isinstance(method, ast.Attribute)}


def written(node: ast.AST) -> str | None:
    """A variable; an attribute of `self` by its name alone, as counters are named, others as `args.beta`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr if node.value.id == "self" else f"{node.value.id}.{node.attr}"
    return None


def _sets_constant(node: ast.AST, name: str) -> bool:
    is_constant = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    return is_constant and any(mentions(target, {name}) for target in node.targets)  # type: ignore[attr-defined]
