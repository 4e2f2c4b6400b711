"""Deterministic attention, where torch only warns about other operators.

# Note [Strict for attention]
# Operators without a deterministic kernel are allowed, and named: so torch is set to warn, not to refuse. But then
# torch's attention takes a backward kernel that adds in any order, although it has one that does not: it takes that one
# only where refusing is on. So refusing is switched on while attention chooses its kernel and while the kernel of its
# backward pass is launched, and for no other operator. The latter is done below autograd, in torch's dispatcher: there
# a compiled model comes by as every other one does. cuDNN's attention has no deterministic kernel that torch offers,
# and a compiler chooses where nobody can switch refusing on: so it is not to be chosen at all, unless cuDNN's front end
# is there, by which lockstep computes its backward pass (Note [cuDNN's other backward pass]).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.determinism.cudnn_attention import OPERATOR, CudnnBackward, front_end

FLASH_BACKWARD = "_scaled_dot_product_flash_attention_backward"
BACKWARDS = (
    FLASH_BACKWARD,
    "_scaled_dot_product_efficient_attention_backward",
    "_flash_attention_backward",
    "_efficient_attention_backward",
)
"""The operators whose kernels are deterministic where torch refuses those that are not."""


@contextmanager
def deterministic_attention(device: torch.device) -> Iterator[None]:
    """Inside, attention on this GPU is deterministic, compiled or not. See Note [Strict for attention]."""
    with ExitStack() as undo:
        undo.enter_context(strict_backwards(BACKWARDS, "AutogradCUDA"))
        cudnn = front_end() if device.type == "cuda" else None
        if cudnn is None:
            undo.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
            torch.backends.cuda.enable_cudnn_sdp(False)
            undo.enter_context(_strict_choice())
        else:
            backward = CudnnBackward(cudnn, device, _strict(_operator(FLASH_BACKWARD)))
            undo.callback(backward.close)
            undo.enter_context(_replaced({OPERATOR: backward}, "AutogradCUDA"))
        yield


@contextmanager
def strict_backwards(names: tuple[str, ...], key: str) -> Iterator[None]:
    """Inside, the kernels of these operators are launched with refusing on, and nothing else is."""
    with _replaced({name: _strict(_operator(name)) for name in names}, key):
        yield


@contextmanager
def _replaced(launches: Mapping[str, Callable[..., Any]], key: str) -> Iterator[None]:
    """Inside, torch's dispatcher calls these for its operators of these names."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, launch in launches.items():
            library.impl(name, launch, key)
        yield
    finally:
        library._destroy()


def _operator(name: str) -> Callable[..., Any]:
    operator: Callable[..., Any] = getattr(torch.ops.aten, name).default
    return operator


def _strict(operator: Callable[..., Any]) -> Callable[..., Any]:
    def launch(*args: Any, **kwargs: Any) -> Any:
        warns = _switch_on()
        try:
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*args, **kwargs)
        finally:
            _restore(warns)

    return launch


@contextmanager
def _strict_choice() -> Iterator[None]:
    """Inside, F.scaled_dot_product_attention chooses its kernel with refusing on."""
    own: Callable[..., torch.Tensor] = F.scaled_dot_product_attention

    @wraps(own)
    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return own(*args, **kwargs)
        warns = _switch_on()
        try:
            return own(*args, **kwargs)
        finally:
            _restore(warns)

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        if F.scaled_dot_product_attention is attention:  # else other code has replaced it since
            F.scaled_dot_product_attention = own


def _switch_on() -> bool:
    """Returns whether torch was set to warn only; if deterministic kernels are off, changes nothing."""
    warns = torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    if warns:
        torch._C._set_deterministic_algorithms(True, warn_only=False)
    return warns


def _restore(warns: bool) -> None:
    if warns:
        torch._C._set_deterministic_algorithms(True, warn_only=True)
