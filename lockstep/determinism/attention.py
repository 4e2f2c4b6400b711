"""Deterministic attention, where torch only warns about other operators.

# Note [Strict for attention]
# Operators without a deterministic kernel are allowed, and named: so torch is set to warn, not to refuse. But then
# torch's attention takes a backward kernel that adds in any order, although it has one that does not: it takes that one
# only where refusing is on. So refusing is switched on while attention chooses its kernel and runs its backward pass,
# and for no other operator. This does not reach compiled models: there the choice is reported. A backward pass that
# fails in attention (no memory is left) leaves refusing on: the next attention restores it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F

NAME = "ScaledDotProduct"
DEPTH = 4
"""How far behind the result the kernel's own node may be: padding and slicing come after it."""


_left_on: list[bool] = []
"""One entry for each backward pass of attention that is under way, or has failed."""


@contextmanager
def deterministic_attention() -> Iterator[None]:
    """Inside, F.scaled_dot_product_attention on a GPU is deterministic. See Note [Strict for attention]."""
    own: Callable[..., torch.Tensor] = F.scaled_dot_product_attention

    @wraps(own)
    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return own(*args, **kwargs)
        left_on = _was_left_on()
        warns = _switch_on() or left_on
        try:
            result = own(*args, **kwargs)
        finally:
            _restore(warns)
        node = _kernel_node(result.grad_fn) if result.is_cuda else None
        if node is not None:
            _guard(node)
        return result

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        if F.scaled_dot_product_attention is attention:  # else other code has replaced it since
            F.scaled_dot_product_attention = own


def _guard(node: Any) -> None:
    """Makes the node's kernel, and nothing else, run with refusing on."""
    node.register_prehook(lambda _: _left_on.append(_switch_on()))
    node.register_hook(lambda *_: _restore(not _left_on or _left_on.pop()))  # another thread may have restored it


def _was_left_on() -> bool:
    """Whether a backward pass has failed and left refusing on: none is under way while attention goes forward."""
    left_on = any(_left_on)
    _left_on.clear()
    return left_on


def _switch_on() -> bool:
    """Returns whether torch was set to warn only; if deterministic kernels are off, changes nothing."""
    warns = torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    if warns:
        torch._C._set_deterministic_algorithms(True, warn_only=False)
    return warns


def _restore(warns: bool) -> None:
    if warns:
        torch._C._set_deterministic_algorithms(True, warn_only=True)


def _kernel_node(node: Any) -> Any:
    for _ in range(DEPTH):
        if node is None or NAME in node.name():
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None
