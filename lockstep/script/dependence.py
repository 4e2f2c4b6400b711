"""Whether the training depends on a variable of the script, and which variables a loop resets, by the source.

Pure: source text in. Source that cannot be read, or parsed, shows nothing.

# Note [What depends on a counter]
# Many scripts count batches only to print now and then. So before a script is refused because of a counter, its source
# must show that the training depends on it: a test that mentions the counter, or a name that was computed from it or
# that such a test decides on, guards a call that trains (`optimizer.step()`, `run.lanes(...)`, and the like), or what
# sets a rate, or ends the loop, or the number goes into a loss, a rate, a scheduler, a gradient or parameter that is
# changed in place, a `load_state_dict`, the choice of an optimizer, or a loop's range.
"""

import ast
import linecache
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from lockstep.script.scopes import is_marked, mark, variable, variable_named

TRAINS = frozenset(
    {"step", "zero_grad", "backward", "lanes", "unscale_", "clip_grad_norm_", "clip_grad_value_", "update"}
    | {"load_state_dict"}
)
"""Methods whose call changes what is trained."""

_SHOWN = re.compile(r"bar|tqdm|prog|meter|metric|loss|acc|log|hist|stat|result|info|record|time|prec|score|top_?\d")
"""Words in the names of what is shown, whose `update` trains nothing."""
_STEPS_ALONG = re.compile(r"bar|tqdm|prog|log|timer|prof|writer|meter|metric")
"""Those of what is shown, whose `step` trains nothing."""
_OF_PARAMETERS = re.compile(r"(^|\W)(p|param|parameter)($|\W)|\.(grad|data|weight|bias)\b")
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

    def __post_init__(self) -> None:
        if not is_marked(self.file or self.node):
            mark(self.file or self.node)

    def dependence(
        self,
        name: str,
        *,
        again: bool = False,
        in_calls: bool = True,
        unchanged: Collection[str] = (),
        _callers: frozenset[ast.AST] = frozenset(),
    ) -> Dependence | None:
        """Where the training depends on `name` first, if it does; with `again`, only in what is done more than once.

        With `in_calls`, being passed to a function beside an optimizer counts. Of an object, attributes that are
        `unchanged` do not count where the source names them.
        """
        key = variable_named(name, self.node)
        nodes = [node for part in (self._repeated() if again else self.bodies()) for node in walked(part)]
        tainted = computed_from(nodes, key, self.functions(), {f"!{key}.{one}" for one in unchanged})
        used = next(self._read_in_steps(tainted), None)
        if used is not None:
            return Dependence(used.lineno, f"is read in {used.name}")
        places = (self._decides(node, tainted) or _goes_into(node, tainted, key, in_calls) for node in nodes)
        found = min(filter(None, places), key=lambda dependence: dependence.line, default=None)
        given = (pair for node in nodes if isinstance(node, ast.Call) for pair in self._given(node, tainted))
        inside = (
            Function(callee, self.file).dependence(
                argument, in_calls=in_calls, unchanged=unchanged, _callers=_callers | {self.node}
            )
            for callee, argument in ([] if found else given)
            if callee not in _callers and callee is not self.node
        )
        return found or next(filter(None, inside), None)

    def _given(self, call: ast.Call, tainted: set[str]) -> Iterator[tuple[ast.FunctionDef, str]]:
        """The arguments of the file's own functions to which it passes one of these."""
        callee = self.functions().get(variable(call.func) or "")
        if callee is not None:
            is_method = (variable(call.func) or "").startswith("self.")
            names = [one.arg for one in (*callee.args.posonlyargs, *callee.args.args)][is_method:]
            passed = [*zip(names, call.args, strict=False), *((one.arg, one.value) for one in call.keywords)]
            yield from ((callee, name) for name, value in passed if name is not None and mentions(value, tainted))

    def bodies(self) -> list[ast.AST]:
        """The function; of a class, those of the file that it inherits from too."""
        bodies = [self.node]
        known = {one.name: one for one in walked(self.file or self.node) if isinstance(one, ast.ClassDef)}
        for body in bodies:
            bases = [known.get(written(base) or "") for base in getattr(body, "bases", ())]
            bodies += [base for base in bases if base is not None and base not in bodies]
        return bodies

    def functions(self) -> Mapping[str, ast.FunctionDef]:
        """Those that it may call by their names: of the file, or methods of its own."""
        return _functions_of(self)

    def with_called(self, parts: Iterable[ast.AST]) -> list[ast.AST]:
        """The parts, and the functions of the file that they call, or that those call."""
        found, functions = list(parts), self.functions()
        for part in found:
            named = (functions.get(variable(node) or "") for node in walked(part))
            found += [one for one in named if one is not None and one is not self.node and one not in found]
        return found

    def _repeated(self) -> list[ast.AST]:
        """What is done more than once: loops, what they call, and methods without any that do not make the object."""
        bodies, functions = self.bodies(), self.functions()
        loops: list[ast.AST] = [node for body in bodies for node in walked(body) if isinstance(node, LOOPS)]
        if isinstance(self.node, ast.ClassDef):
            methods = [one for name, one in functions.items() if name.startswith("self.") and one.name != "__init__"]
            loops += [one for one in methods if not any(isinstance(node, LOOPS) for node in walked(one))]
        elif not loops and not isinstance(self.node, ast.Module):
            return [self.node]
        return self.with_called(loops)

    def _read_in_steps(self, tainted: set[str]) -> "Iterator[ast.FunctionDef | ast.ClassDef]":
        """Modules, data sets and functions for loaders that read one of these."""
        around = walked(self.file or self.node)
        given = {name.id for node in around for name in _given_to_loaders(node)}
        for one in around:
            if isinstance(one, ast.ClassDef) and one not in self.bodies() and _is_for_steps(one):
                methods = [method for method in one.body if isinstance(method, ast.FunctionDef)]
                if any(mentions(method, tainted) for method in methods if method.name != "__init__"):
                    yield one
            elif isinstance(one, ast.FunctionDef) and one.name in given and mentions(one, tainted):
                yield one

    def _decides(self, node: ast.AST, tainted: set[str]) -> Dependence | None:
        if not isinstance(node, _TESTED) or not mentions(node.test, tainted):
            return None
        call = next(_training_calls(node), None) or self._skipped_call(node)
        if call is not None:
            return Dependence(node.lineno, f"decides whether {ast.unparse(call.func)}() is called")
        rate = next((target for one in ast.walk(node) for target in _rates_set_by(one)), None)
        if rate is not None:
            return Dependence(node.lineno, f"decides whether {ast.unparse(rate)} is set")
        if isinstance(node, ast.While) or (_has(node, ast.Break, ast.Return) and self._loops_around(node)):
            return Dependence(node.lineno, "decides when the loop ends")
        return None

    def _skipped_call(self, node: ast.If | ast.While | ast.IfExp) -> ast.Call | None:
        """A call that trains, after a `continue` in the same loop, or a `return` in the same function."""
        around: list[ast.AST] = [*self._loops_around(node)] if _has(node, ast.Continue) else []
        if _has(node, ast.Return):
            around = [one for one in self.functions().values() if node in walked(one)]
        behind = (
            (call for call in _training_calls(around[-1]) if call.lineno > (node.end_lineno or 0)) if around else ()
        )
        return next(iter(behind), None)

    def _loops_around(self, node: ast.AST) -> list[ast.For | ast.While]:
        return [
            loop for body in self.bodies() for loop in walked(body) if isinstance(loop, LOOPS) and node in walked(loop)
        ]

    def _loops(self) -> list[ast.For | ast.While]:
        return [node for node in walked(self.node) if isinstance(node, LOOPS)]

    def is_reset(self, name: str) -> bool:
        """Whether a loop sets the name to its first value again: as its own variable, or inside of it."""
        inside = (node for loop in self._loops() for node in walked(loop))
        key = variable_named(name, self.node)
        return self.is_loop_variable(name) or any(_sets_constant(node, key) for node in inside)

    def is_compared(self, name: str) -> bool:
        """Whether the file compares the name with something, or takes the greater or the smaller of both."""
        key = variable_named(name, self.node)
        nodes = [node for part in (self.file or self.node, *self.bodies()) for node in walked(part)]
        comparing = [node for node in nodes if isinstance(node, ast.Compare) or _is_extreme(node)]
        return any(mentions(node, {key}) for node in comparing)

    def is_stepped(self, name: str) -> bool:
        """Whether it is changed by what it was (`w *= 0.9`, `w = 0.9 * w`), and set in no other way in loops."""
        steps = self._steps(name)
        return bool(steps) and all(steps)

    def is_summed_up(self, name: str) -> bool:
        """Whether it is changed by what it was, and may be set in other ways too."""
        return any(self._steps(name))

    def _steps(self, name: str) -> list[bool]:
        """Of every statement in loops that sets it: whether it goes on from what it was."""
        key = variable_named(name, self.node)
        nodes = [node for part in self.with_called(self._loops()) for node in walked(part)]
        setting = [node for node in nodes if isinstance(node, _ASSIGNS) and key in _targets(node)]
        return [
            isinstance(node, ast.AugAssign) or (isinstance(node.value, ast.BinOp) and mentions(node.value, {key}))
            for node in setting
        ]

    def is_set_in_loop(self, name: str) -> bool:
        """Whether a loop sets the name itself, not only what it refers to."""
        key = variable_named(name, self.node)
        return any(binds(part, key) for part in self.with_called(self._loops()))

    def is_loop_variable(self, name: str) -> bool:
        key = variable_named(name, self.node)
        return any(is_target(loop, key) for loop in self._loops())


def _is_extreme(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max")


@lru_cache(maxsize=32)
def _functions_of(function: Function) -> Mapping[str, ast.FunctionDef]:
    bodies = function.bodies()
    nodes = [node for body in (function.file or function.node, *bodies) for node in walked(body)]
    methods = {id(one) for node in nodes if isinstance(node, ast.ClassDef) for one in node.body}
    free = {variable(one) or "": one for one in nodes if isinstance(one, ast.FunctionDef) and id(one) not in methods}
    own = [one for body in reversed(bodies) if isinstance(body, ast.ClassDef) for one in body.body]
    return free | {f"self.{one.name}": one for one in own if isinstance(one, ast.FunctionDef)}


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
        tree = ast.parse("".join(linecache.getlines(path)), path)
    except (SyntaxError, ValueError, RecursionError):
        return None
    mark(tree)
    return tree


@lru_cache(maxsize=128)
def walked(node: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a file, a function or a loop, which are looked through many times: `ast.walk` takes 50 times as
    long as a look at each."""
    return tuple(ast.walk(node))


def computed_from(
    nodes: Sequence[ast.AST],
    name: str,
    functions: Mapping[str, ast.FunctionDef] | None = None,
    unchanged: Iterable[str] = (),
) -> set[str]:
    """The variable, all that are given something in which one of them is mentioned, or where a test that mentions one
    of them decides, and those of the functions whose results do so. `unchanged` attributes, as `!work.loader`, are no
    mention of their object."""
    tainted = {name, *unchanged}
    while True:
        new = {target for node in nodes for target in _assigned_by(node, tainted)}
        new |= {name for name, function in (functions or {}).items() if gives(function, tainted)}
        if new <= tainted:
            return tainted
        tainted |= new


def gives(function: ast.FunctionDef, tainted: set[str]) -> bool:
    """Whether the result of a function depends on one of these."""
    results = [node for node in walked(function) if isinstance(node, ast.Return | ast.Yield) and node.value is not None]
    tests = [node for node in walked(function) if isinstance(node, _TESTED) and mentions(node.test, tainted)]
    decided = {id(node) for test in tests for node in ast.walk(test)}
    return any(id(node) in decided or mentions(node, tainted) for node in results)


def _given_to_loaders(node: ast.AST) -> Iterator[ast.Name]:
    """Functions that a call is given to read samples by, such as `collate_fn=pad`."""
    keywords = [one for one in node.keywords if one.arg in _OF_LOADERS] if isinstance(node, ast.Call) else []
    return (name for one in keywords for name in ast.walk(one.value) if isinstance(name, ast.Name))


def _is_for_steps(definition: ast.ClassDef) -> bool:
    """Whether its objects are modules, or data sets."""
    return any(kind in ast.unparse(base) for base in definition.bases for kind in _READ_IN_STEPS)


def own_names(function: ast.AST) -> set[str]:
    """The arguments of a function and what it sets, those of functions inside of it too."""
    nodes = walked(function)
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.arg for node in nodes if isinstance(node, ast.arg)}


def _assigned_by(node: ast.AST, tainted: set[str]) -> list[str]:
    if isinstance(node, _ASSIGNS):
        return _targets(node) if node.value is not None and mentions(node.value, tainted) else []
    if isinstance(node, ast.For) and mentions(node.iter, tainted):
        return _bases(node.target)
    if isinstance(node, _TESTED) and mentions(node.test, tainted):
        return [target for inner in ast.walk(node) if isinstance(inner, _ASSIGNS) for target in _targets(inner)]
    return []


def binds(node: ast.AST, name: str) -> bool:
    """Whether a statement in it sets the variable itself: of `table["best"] = 1` that is not `table`."""
    return any(variable(one) == name and isinstance(getattr(one, "ctx", None), ast.Store) for one in walked(node))


def _goes_into(node: ast.AST, tainted: set[str], name: str, in_calls: bool) -> Dependence | None:
    if is_target(node, name) and is_range(node):
        return Dependence(node.lineno, "decides how long the loop goes on")  # type: ignore[attr-defined]
    if isinstance(node, ast.Call):
        takes = _takes_rates(node) if in_calls else _trains(node)
        given = takes and any(mentions(part, tainted) for part in _arguments(node))
        if given or (_trains_by_owner(node) and mentions(node.func, tainted)):
            return Dependence(node.lineno, f"goes into {ast.unparse(node)}")
    rates = [*_rates_set_by(node), *_parameters_set_by(node)]
    if isinstance(node, _ASSIGNS) and rates and node.value is not None and mentions(node.value, tainted):
        return Dependence(node.lineno, f"goes into {ast.unparse(rates[0])}")
    return None


def _training_calls(node: ast.AST) -> Iterator[ast.Call]:
    return (call for call in ast.walk(node) if isinstance(call, ast.Call) and _trains(call))


def _trains(call: ast.Call) -> bool:
    """Or changes a parameter, or its gradient, in place. A progress bar has an `update` too."""
    if not isinstance(call.func, ast.Attribute):
        return False
    owner, method = ast.unparse(call.func.value), call.func.attr
    if method.endswith("_") and not method.endswith("__") and _OF_PARAMETERS.search(owner):
        return True
    is_shown = _SHOWN if method == "update" else _STEPS_ALONG
    return method in TRAINS and not is_shown.search(owner.lower())


def _trains_by_owner(call: ast.Call) -> bool:
    """`loss.backward()`, `optimizers[k].step()`: which one it is decides."""
    if not isinstance(call.func, ast.Attribute):
        return False
    is_step = call.func.attr == "step" and _OPTIMIZER.search(ast.unparse(call.func.value).lower()) is not None
    return is_step or call.func.attr == "backward"


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
    return any(isinstance(call, ast.Call) and "range" in (written(call.func) or "") for call in parts)


def _rates_set_by(node: ast.AST) -> list[ast.expr]:
    if not isinstance(node, _ASSIGNS):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target for target in targets if _is_rate(target)]


def _parameters_set_by(node: ast.AST) -> list[ast.expr]:
    """`p.grad = ...`, `p.data *= ...`, `p -= ...`: parameters and gradients."""
    if isinstance(node, ast.AugAssign) and _OF_PARAMETERS.search(ast.unparse(node.target)):
        return [node.target]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target for target in targets if isinstance(target, ast.Attribute) and target.attr in ("grad", "data")]


def _is_rate(target: ast.AST) -> bool:
    """`group["lr"]`, `self.lr`: something that an optimizer reads."""
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return target.slice.value in _RATES
    return isinstance(target, ast.Attribute) and target.attr in _RATES


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def mentions(node: ast.AST, names: set[str]) -> bool:
    """Whether one of them is read or set in it, by more than an attribute that has not changed."""
    inside = list(ast.walk(node))
    passed = {id(one.value) for one in inside if isinstance(one, ast.Attribute) and f"!{variable(one)}" in names}
    return any(variable(inner) in names and id(inner) not in passed for inner in inside)


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [name for target in targets for name in _bases(target)]


def _bases(target: ast.expr) -> list[str]:
    """What is changed where this is set: of `a.b[i]` that is `a` and `a.b`, of `self.b[i]` it is `self.b`."""
    if isinstance(target, ast.Tuple | ast.List):
        return [name for part in target.elts for name in _bases(part)]
    names = []
    while isinstance(target, ast.Subscript | ast.Attribute | ast.Starred):
        names.append(variable(target))
        target = target.value
    names.append(None if isinstance(target, ast.Name) and target.id == "self" else variable(target))
    return [name for name in names if name is not None]


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
