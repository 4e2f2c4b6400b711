"""What trains: calls that change parameters or gradients, what sets a rate, and whose code computes a step. Pure."""

import ast
import re
from collections.abc import Iterator

from lockstep.script.source.syntax import ASSIGNS, called_name, given_to, targets_of, written

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
_READ_IN_STEPS = ("Module", "Dataset")
"""Words in the names of classes whose objects compute, or read, what is trained on."""
_OF_LOADERS = frozenset({"collate_fn", "transform", "target_transform", "batch_sampler", "sampler", "worker_init_fn"})


def training_calls(node: ast.AST) -> Iterator[ast.Call]:
    return (call for call in ast.walk(node) if isinstance(call, ast.Call) and trains(call))


def trains(call: ast.Call) -> bool:
    """Or changes a parameter, or its gradient, in place. A progress bar has an `update` too."""
    if not isinstance(call.func, ast.Attribute):
        return False
    owner, method = ast.unparse(call.func.value), call.func.attr
    if method.endswith("_") and not method.endswith("__") and _OF_PARAMETERS.search(owner):
        return True
    is_shown = _SHOWN if method == "update" else _STEPS_ALONG
    return method in TRAINS and not is_shown.search(owner.lower())


def changes_parameters(node: ast.AST) -> bool:
    """`teacher.load_state_dict(...)`, `p.data = ...`, `p.mul_(...)`: weights, by more than an update."""
    if not isinstance(node, ast.Call):
        return bool(parameters_set_by(node))
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return method == "load_state_dict" or (trains(node) and method not in TRAINS)


def trains_by_owner(call: ast.Call) -> bool:
    """`loss.backward()`, `optimizers[k].step()`: which one it is decides."""
    if not isinstance(call.func, ast.Attribute):
        return False
    is_step = call.func.attr == "step" and _OPTIMIZER.search(ast.unparse(call.func.value).lower()) is not None
    return is_step or call.func.attr == "backward"


def takes_rates(call: ast.Call) -> bool:
    """A method of a scheduler (`step`, `step_update`), or a function that gets one, or an optimizer, beside others."""
    given = (name.lower() for part in given_to(call) if (name := written(part)) is not None)
    return trains(call) or _steps_a_scheduler(call) or any(_OPTIMIZER.search(name) for name in given)


def _steps_a_scheduler(call: ast.Call) -> bool:
    """Its other methods are asked for something, as `get_last_lr`."""
    if not isinstance(call.func, ast.Attribute) or "step" not in call.func.attr:
        return False
    return _OPTIMIZER.search(ast.unparse(call.func.value).lower()) is not None


def rates_set_by(node: ast.AST) -> list[ast.expr]:
    """`group["lr"]`, `self.lr`: something that an optimizer reads."""
    return [target for target in targets_of(node) if isinstance(node, ASSIGNS) and _is_rate(target)]


def parameters_set_by(node: ast.AST) -> list[ast.expr]:
    """`p.grad = ...`, `p.data *= ...`, `p -= ...`: parameters and gradients."""
    if isinstance(node, ast.AugAssign) and _OF_PARAMETERS.search(ast.unparse(node.target)):
        return [node.target]
    targets = targets_of(node) if isinstance(node, ast.Assign) else []
    return [target for target in targets if isinstance(target, ast.Attribute) and target.attr in ("grad", "data")]


def _is_rate(target: ast.AST) -> bool:
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return target.slice.value in _RATES
    return isinstance(target, ast.Attribute) and target.attr in _RATES


def is_range(node: ast.AST) -> bool:
    """Whether it is a loop over `range(...)`, also inside of a progress bar."""
    parts = ast.walk(node.iter) if isinstance(node, ast.For) else iter(())
    return any(isinstance(call, ast.Call) and called_name(call) == "range" for call in parts)


def given_to_loaders(node: ast.AST) -> Iterator[str]:
    """The names of functions that a call is given to read samples by, such as `collate_fn=pad`."""
    keywords = [one for one in node.keywords if one.arg in _OF_LOADERS] if isinstance(node, ast.Call) else []
    return (name.id for one in keywords for name in ast.walk(one.value) if isinstance(name, ast.Name))


def is_for_steps(definition: ast.ClassDef) -> bool:
    """Whether its objects are modules, or data sets."""
    return any(kind in ast.unparse(base) for base in definition.bases for kind in _READ_IN_STEPS)
