"""Hooks of the script that change gradients by more than a factor, as far as their code shows it.

# Note [Hooks that are not linear]
# A hook of a parameter is called with the gradient of each lane, where a plain loop calls it with that of the batch. A
# factor or a mask gives the same sum. A bound, a sign or a norm does not: the mean of clipped gradients is not the
# clipped mean. To try a hook would run what it does besides, so only the names that its code uses are looked at. One
# that gives nothing back, as for a log, changes nothing, unless it writes into what it is given.
"""

import dis
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

from torch import nn

from lockstep.launch.channels.traceback_lines import is_users

_IN_PLACE = frozenset(
    f"{name}_"
    for name in ("clamp", "clip", "clamp_min", "clamp_max", "sign", "sgn", "tanh", "renorm", "abs", "round", "normal",
                 "uniform", "clip_grad_norm", "clip_grad_value")
)  # fmt: skip
_NOT_LINEAR = _IN_PLACE | {
    *("clamp", "clip", "clamp_min", "clamp_max", "minimum", "maximum", "max", "min", "amax", "abs", "sign", "sgn"),
    *("norm", "vector_norm", "normalize", "renorm", "std", "var", "rms", "tanh", "sigmoid", "relu", "round", "topk"),
    *("quantile", "pow", "sqrt", "rsqrt", "square", "randn_like", "rand_like", "randn", "rand", "normal", "nan_to_num"),
}
_GIVES_NOTHING = frozenset({"append", "extend", "add", "update", "print", "add_scalar", "add_histogram", "setdefault"})


def hooks_that_are_not_linear(models: Iterable[nn.Module]) -> list[str]:
    """In words, those of the models' parameters, and of modules where they give back other gradients."""
    found = []
    for model in models:
        for name, parameter in model.named_parameters():
            found += [f"{words} of {name}" for words in _not_linear(getattr(parameter, "_backward_hooks", None))]
        for name, module in model.named_modules():
            for hooks in (module._backward_hooks, module._backward_pre_hooks):
                found += [f"{words} of {name or type(module).__name__}" for words in _not_linear(hooks)]
    return list(dict.fromkeys(found))


def _not_linear(hooks: Mapping[int, Any] | None) -> Iterator[str]:
    for hook in list((hooks or {}).values()):
        while isinstance(hook, partial):
            hook = hook.func
        function = getattr(hook, "__func__", hook)
        code = getattr(function, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
        name = getattr(function, "__name__", type(hook).__name__)
        if code is not None and is_users(code.co_filename):
            if _changes(code):
                yield f"`{name}` (line {code.co_firstlineno} of {Path(code.co_filename).name})"
        elif name in _NOT_LINEAR:  # such as torch.sign
            yield f"`{name}`"


def _changes(code: CodeType) -> bool:
    names = _names(code)
    return bool(names & _IN_PLACE) or (bool(names & _NOT_LINEAR) and _gives_back(code))


def _names(code: CodeType) -> set[str]:
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _gives_back(code: CodeType) -> bool:
    """Whether it may return something else than a constant, as None."""
    if code.co_name == "<lambda>" and set(code.co_names) & _GIVES_NOTHING:
        return False
    names = [one.opname for one in dis.get_instructions(code)]
    return any(now == "RETURN_VALUE" and before != "LOAD_CONST" for before, now in pairwise(names))
